"""The end of a bus, and its life through an outage and bad input."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from contract_bus import open_bus, served, take, two_buses, wanted
from contract_hostile import INJECTED
from contract_support import Attack, Mesh

import zbus

CLOSE_S = 7.0  # close_timeout_s is 5


async def closed_in(bus: zbus.Bus) -> float:
    began = time.monotonic()
    await bus.aclose()
    return time.monotonic() - began


async def test_an_idle_bus_closes_in_bounded_time_and_twice_is_once(any_transport: Mesh) -> None:
    async with two_buses(any_transport) as (here, there):
        async with there.subscribe("a/**"):
            await wanted(here, ["a/b"])
            assert await closed_in(there) < CLOSE_S
            assert await closed_in(there) < 0.5
            assert await closed_in(here) < CLOSE_S
        with pytest.raises(zbus.BusClosed):
            await here.publisher("a/b")
        with pytest.raises(zbus.BusClosed):
            await here.request("a/b", b"x")
        with pytest.raises(zbus.BusClosed):
            there.subscribe("a/b")


@pytest.mark.parametrize("first", ["publisher", "subscriber"])
async def test_a_bus_under_load_closes_in_bounded_time(any_transport: Mesh, first: str) -> None:
    async with two_buses(any_transport) as (here, there), AsyncExitStack() as stack:
        subscription = await stack.enter_async_context(there.subscribe("load/**", queue_events=100))

        @there.serve("load/x")
        async def slow(request: zbus.Event) -> bytes:
            if request.payload != b"served?":
                await asyncio.sleep(60)
            return b""

        await served(here, "load/x")
        await wanted(here, ["load/x"])
        publisher = await here.publisher("load/x")

        async def publish() -> None:
            while True:
                await publisher.publish(b"x" * 100)
                await asyncio.sleep(0)

        load = [asyncio.create_task(publish())]
        load += [asyncio.create_task(here.request("load/x", b"x", timeout=30.0)) for _ in range(5)]
        async with asyncio.timeout(20):
            while subscription.queued < 50:
                await asyncio.sleep(0.005)

        took_s = await closed_in(here if first == "publisher" else there)

        for task in load:
            task.cancel()
        ended = await asyncio.wait_for(asyncio.gather(*load, return_exceptions=True), 10)
        assert took_s < CLOSE_S
        assert all(isinstance(each, (zbus.ZbusError, asyncio.CancelledError)) for each in ended)


async def test_a_bus_closes_in_bounded_time_during_an_outage(middle_transport: Mesh, tmp_path: Path) -> None:
    far = middle_transport.spawn()
    far.listen(["away/**"])
    async with open_bus(middle_transport, tmp_path / "app.db") as here, open_bus(middle_transport) as there:
        async with there.subscribe("near/**"):
            await wanted(here, ["away/x"])
            publisher = await here.publisher("away/x")
            await publisher.publish(b"x")
            middle_transport.cut(far)
            try:
                for _ in range(100):
                    await publisher.publish(b"x")
                took_s = [await closed_in(here), await closed_in(there)]
            finally:
                middle_transport.mend(far)

    assert max(took_s) < CLOSE_S


async def test_what_is_published_during_an_outage_arrives_after_it(middle_transport: Mesh, tmp_path: Path) -> None:
    far = middle_transport.spawn()
    async with two_buses(middle_transport, tmp_path / "app.db") as (here, there):
        async with there.subscribe("outage/**", queue_events=10_000) as subscription:
            await wanted(here, ["outage/x"])
            publisher = await here.publisher("outage/x")
            for number in range(200):
                await publisher.publish(b"%d" % number)
            await take(subscription, 10)
            middle_transport.cut(far)
            for number in range(200, 400):
                await publisher.publish(b"%d" % number)
            middle_transport.mend(far)
            for number in range(400, 600):
                await publisher.publish(b"%d" % number)

            events = await take(subscription, 590)
            assert [int(event.payload) for event in events] == list(range(10, 600))
            await asyncio.sleep(0.3)
            assert subscription.queued == 0


async def test_requests_are_answered_again_after_an_outage(middle_transport: Mesh) -> None:
    far = middle_transport.spawn()
    async with two_buses(middle_transport) as (here, there):

        @there.serve("echo/x")
        async def echo(request: zbus.Event) -> bytes:
            return request.payload

        await served(here, "echo/x")
        middle_transport.cut(far)
        try:
            # If requests do not pass through the server, they get replies all the time.
            assert (await asyncio.wait_for(here.request("echo/x", b"x", timeout=1.0), 15)).payload == b"x"
        except zbus.ZbusError:
            pass
        middle_transport.mend(far)
        async with asyncio.timeout(20):
            while True:
                try:
                    assert (await here.request("echo/x", b"x", timeout=1.0)).payload == b"x"
                    break
                except zbus.ZbusError:
                    await asyncio.sleep(0.05)


async def test_bad_input_is_counted_and_what_follows_arrives(transport: Mesh, tmp_path: Path) -> None:
    async with open_bus(transport) as there, there.subscribe("hostile/**", queue_events=10_000) as subscription:

        @there.serve("ask/near")
        async def echo(request: zbus.Event) -> bytes:
            return request.payload

        async with open_bus(transport, tmp_path / "app.db") as here:
            await wanted(here, ["hostile/key"])
            await served(here, "ask/near")
            publisher = await here.publisher("hostile/key")
            await publisher.publish(b"good 0")
            far = transport.spawn()
            await asyncio.to_thread(far.wanted, ["hostile/key"])
            bad = there.stats().get("invalid_received", 0)

            def reached() -> bool:
                time.sleep(0.1)
                return there.stats().get("invalid_received", 0) > bad + 50

            attack = Attack(
                key="hostile/key",
                answered="ask/near",
                send=lambda: far.send([("hostile/key", INJECTED)]),
                reached=reached,
            )
            await asyncio.to_thread(transport.inject, attack)
            for number in range(1, 100):
                await publisher.publish(b"good %d" % number)

            events = await take(subscription, 100)
            assert [event.payload for event in events] == [b"good %d" % number for number in range(100)]
            assert (await here.request("ask/near", b"still there", timeout=10.0)).payload == b"still there"
            await asyncio.to_thread(far.close)
