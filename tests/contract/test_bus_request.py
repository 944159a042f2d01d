"""`bus.request` and `@bus.serve`: one reply, or an error that says which of the possible things is true."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from contract_bus import open_bus, served, take, two_buses, wanted
from contract_support import Mesh

import zbus
from zbus.errors import HandlerFailed, NoResponders, RequestTimeout
from zbus.mesh.request_client import CANCELS

QUICK_S = 2.0


class Weather(Exception):
    """An error of the application."""


async def test_a_request_brings_one_reply(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):

        @there.serve("prices/größe.x")
        async def double(request: zbus.Event) -> bytes:
            return request.payload * 2

        await served(here, "prices/größe.x")
        for payload in (b"", b"ab", bytes(range(256)), random.Random(4).randbytes(1_500_000)):
            reply = await here.request("prices/größe.x", payload, timeout=20.0)
            assert reply.payload == payload * 2
            assert reply.key == "prices/größe.x"


async def test_what_is_not_bytes_crosses_as_it_would_in_an_event(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):

        @there.serve("prices/quote")
        async def quote(request: zbus.Event) -> dict[str, object]:
            if request.payload == b"served?":
                return {}
            return {"seen": request.decode(dict), "headers": dict(request.headers)["tenant"]}

        @there.serve("prices/nothing")
        async def nothing(request: zbus.Event) -> None:
            return None

        await served(here, "prices/quote")
        await served(here, "prices/nothing")
        reply = await here.request("prices/quote", {"sku": 7}, headers={"tenant": "x"})
        assert reply.decode(dict) == {"seen": {"sku": 7}, "headers": "x"}
        assert (await here.request("prices/nothing")).payload == b""


async def test_many_requests_at_once_keep_apart(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):

        @there.serve("echo/x")
        async def echo(request: zbus.Event) -> bytes:
            await asyncio.sleep(random.random() * 0.05)
            return request.payload

        await served(here, "echo/x")
        replies = await asyncio.gather(*[here.request("echo/x", b"%d" % n, timeout=20.0) for n in range(200)])
        assert [reply.payload for reply in replies] == [b"%d" % n for n in range(200)]


async def test_a_request_without_responders_fails_at_once(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, _):
        began = time.monotonic()
        with pytest.raises(NoResponders) as caught:
            await here.request("nobody/here", b"x", timeout=10.0)

    assert caught.value.key == "nobody/here"
    assert time.monotonic() - began < QUICK_S


async def test_a_request_that_takes_too_long_says_so_and_its_handler_is_cancelled(any_transport: Mesh) -> None:
    cancelled = asyncio.Event()
    async with two_buses(any_transport) as (here, there):

        @there.serve("slow/x")
        async def slow(request: zbus.Event) -> bytes:
            if request.payload == b"served?":
                return b""
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return b"too late"

        await served(here, "slow/x")
        began = time.monotonic()
        with pytest.raises(RequestTimeout) as caught:
            await here.request("slow/x", b"x", timeout=0.5)
        took_s = time.monotonic() - began
        await asyncio.wait_for(cancelled.wait(), 10)

    assert (caught.value.key, caught.value.timeout_s) == ("slow/x", 0.5)
    assert 0.4 < took_s < 0.5 + QUICK_S


async def test_a_handler_that_raises_is_an_error_of_the_request(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):

        @there.serve("bad/x")
        async def bad(request: zbus.Event) -> bytes:
            if request.payload == b"served?":
                return b""
            raise Weather(f"rain in {request.payload.decode()} ü")

        await served(here, "bad/x")
        with pytest.raises(HandlerFailed) as caught:
            await here.request("bad/x", b"Ulm", timeout=10.0)

        assert (caught.value.key, caught.value.kind, caught.value.reason) == ("bad/x", "Weather", "rain in Ulm ü")
        assert (await here.request("bad/x", b"served?")).payload == b""


async def test_a_reply_that_is_no_payload_is_an_error_of_the_request(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):

        @there.serve("bad/reply")
        async def bad(request: zbus.Event) -> object:
            return b"" if request.payload == b"served?" else object()

        await served(here, "bad/reply")
        with pytest.raises(HandlerFailed):
            await here.request("bad/reply", b"x", timeout=10.0)


async def test_the_handler_sees_that_its_caller_was_cancelled(any_transport: Mesh) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()
    async with two_buses(any_transport) as (here, there):

        @there.serve("slow/x")
        async def slow(request: zbus.Event) -> bytes:
            if request.payload == b"served?":
                return b""
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return b""

        await served(here, "slow/x")
        await wanted(here, [CANCELS])  # otherwise nothing carries the cancellation
        caller = asyncio.create_task(here.request("slow/x", b"x", timeout=50.0))
        await asyncio.wait_for(begun.wait(), 10)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.wait_for(cancelled.wait(), 10)
        assert (await here.request("slow/x", b"served?")).payload == b""


async def test_one_of_several_who_serve_a_key_replies_and_the_other_when_it_leaves(transport: Mesh) -> None:
    async with open_bus(transport) as asker, open_bus(transport) as stays:
        handled: list[bytes] = []

        async def handle(request: zbus.Event) -> bytes:
            handled.append(request.payload)
            return request.payload

        stays.serve("work/x")(handle)
        async with open_bus(transport) as leaves:
            leaves.serve("work/x")(handle)
            await served(asker, "work/x")
            handled.clear()
            for number in range(30):
                assert (await asker.request("work/x", b"%d" % number)).payload == b"%d" % number
            assert handled == [b"%d" % number for number in range(30)]
        handled.clear()
        await served(asker, "work/x")
        assert (await asker.request("work/x", b"left")).payload == b"left"
        assert handled[-1] == b"left"


async def test_a_key_whose_server_left_has_no_responders(transport: Mesh) -> None:
    async with open_bus(transport) as asker:
        async with open_bus(transport) as leaves:

            @leaves.serve("gone/x")
            async def echo(request: zbus.Event) -> bytes:
                return request.payload

            await served(asker, "gone/x")
        async with asyncio.timeout(20):
            while True:
                try:
                    await asker.request("gone/x", b"x", timeout=1.0)
                except NoResponders:
                    break
                except RequestTimeout:
                    pass


async def test_requests_and_events_go_side_by_side(any_transport: Mesh) -> None:
    async with (
        two_buses(any_transport) as (here, there),
        there.subscribe("work/**", queue_events=5_000) as subscription,
    ):

        @there.serve("work/x")
        async def echo(request: zbus.Event) -> bytes:
            return request.payload

        await served(here, "work/x")
        await wanted(here, ["work/x"])
        publisher = await here.publisher("work/x")

        async def publish() -> None:
            for number in range(500):
                await publisher.publish(b"%d" % number)

        _, *replies = await asyncio.gather(publish(), *[here.request("work/x", b"%d" % n) for n in range(50)])

        assert [reply.payload for reply in replies] == [b"%d" % n for n in range(50)]
        assert [event.payload for event in await take(subscription, 500)] == [b"%d" % n for n in range(500)]
        assert subscription.queued == 0  # a request is not an event
