"""What fleets do to a bus: readers that come and go, blocked loops, large payloads, clocks that differ, two sinks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inside import node_of
from mesh_lossy import Buses, Losses, buses_on, eventually, nothing_more, take, wanted
from mesh_support import WIRES, Nats, ZenohPeers, ZenohRouter, Zmq

import zbus

KEY = "shop/orders"


@pytest.fixture
async def buses(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Buses]:
    async with buses_on(getattr(request, "param", ZenohPeers), tmp_path, monkeypatch) as found:
        yield found


on_every_wire = pytest.mark.parametrize("buses", WIRES, ids=[each.name for each in WIRES], indirect=True)


@pytest.mark.parametrize(
    ("buses", "logged"),
    [(ZenohPeers, True), (ZenohPeers, False), (Nats, False), (Zmq, True)],
    ids=["zenoh-with-a-log", "zenoh-without", "nats-without", "zmq-with-a-log"],
    indirect=["buses"],
)
async def test_readers_that_come_and_go_do_not_disturb_others(buses: Buses, logged: bool) -> None:
    a, b = await buses.open("a", log=logged), await buses.open("b", log=False)
    publisher = await a.publisher(KEY)
    async with b.subscribe(KEY, queue_events=100_000) as steady:
        await wanted(a, KEY)
        stop = asyncio.Event()

        async def publish() -> None:
            while not stop.is_set():
                await publisher.publish(b"")
                await asyncio.sleep(0.001)

        publishing = asyncio.create_task(publish())
        for expressions in (["shop/**"], ["**"], ["*/orders", "shop/*"], ["other"], ["shop/**", "**"]) * 2:
            async with b.subscribe(*expressions, queue_events=100_000) as passing:
                if expressions != ["other"]:
                    came = [event.sequence for event in await take(passing, 20)]
                    assert came == list(range(came[0], came[0] + 20))
        stop.set()
        await publishing
        events = await take(steady, publisher.sequence, 5)
        assert [event.sequence for event in events] == list(range(publisher.sequence))
        await nothing_more(steady, 0.3)
    assert not b.stats().get("gaps_unrepaired"), b.stats()


@on_every_wire
async def test_large_events_are_repaired_too(buses: Buses) -> None:
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", log=False, losses=losses)
    publisher = await a.publisher(KEY)
    async with b.subscribe(KEY, queue_events=10_000) as subscription:
        await wanted(a, KEY)
        await publisher.publish(b"first")
        assert await take(subscription, 1)
        losses.of_events = lambda sequences: True
        payload = b"x" * 500_000
        for _ in range(5):
            await publisher.publish_many([payload] * 10)
        await eventually(lambda: losses.events_lost >= 50)
        losses.of_events = lambda sequences: False
        await publisher.publish(b"last")

        events = await take(subscription, 51, 20)

        assert [event.sequence for event in events] == list(range(1, 52))
        assert all(len(event.payload) == 500_000 for event in events[:-1])


@pytest.mark.parametrize("behind_s", [-30, 30])
async def test_a_publisher_whose_clock_differs_has_its_events_repaired_too(
    buses: Buses, monkeypatch: pytest.MonkeyPatch, behind_s: int
) -> None:
    losses = Losses()
    a, b = await buses.open("a"), await buses.open("b", losses=losses)
    monkeypatch.setattr(node_of(a).entry, "time_ns", lambda: time.time_ns() - behind_s * 1_000_000_000)
    losses.of_events = lambda sequences: 5 in sequences
    publisher = await a.publisher(KEY)
    async with b.subscribe(KEY, overflow="spill") as subscription, b.subscribe("@zbus/gap") as gaps:
        await wanted(a, KEY)
        for _ in range(10):
            await publisher.publish(b"")
            await asyncio.sleep(0.005)

        events = await take(subscription, 10, 4)

        reported = [gap.decode(dict) for gap in await take(gaps, 1, 0.2)]
        assert [event.sequence for event in events] == list(range(10)), (reported, b.stats())


async def test_a_blocked_loop_costs_no_event(buses: Buses, tmp_path: Path) -> None:
    a, b = await buses.open("a"), await buses.open("b")
    publisher = await a.publisher(KEY)
    async with b.subscribe(KEY, overflow="spill") as subscription:
        await wanted(a, KEY)
        await publisher.publish_many([b"x" * 1000] * 5_000)
        time.sleep(1.0)  # the application does something stupid
        await publisher.publish_many([b"x" * 1000] * 5_000)
        events = await take(subscription, 10_000, 20)
        assert [event.sequence for event in events] == list(range(10_000))


async def test_a_blocking_subscription_that_reads_late_gets_every_event_of_other_nodes(buses: Buses) -> None:
    """What it holds meanwhile is bounded: see test_blocked_subscription.py."""
    a, b = await buses.open("a"), await buses.open("b", log=False)
    publisher = await a.publisher(KEY)
    async with b.subscribe(KEY, overflow="block", queue_events=100) as subscription:
        await wanted(a, KEY)
        for _ in range(20):
            await publisher.publish_many([b""] * 1_000)
        await eventually(lambda: subscription.queued == 20_000)
        events = await take(subscription, 20_000)
        assert [event.sequence for event in events] == list(range(20_000))
        assert subscription.dropped == 0


async def test_a_reader_of_what_is_new_is_not_given_what_its_node_missed_while_it_was_away(buses: Buses) -> None:
    a, b = await buses.open("a"), await buses.open("b")
    publisher = await a.publisher(KEY)
    async with b.subscribe(KEY, durable="d") as durable:
        await wanted(a, KEY)
        await publisher.publish(b"seen")
        assert await take(durable, 1)
    await b.aclose()
    await publisher.publish_many([b"missed"] * 100)
    again = await buses.open("b")
    async with again.subscribe(KEY) as plain, again.subscribe(KEY, durable="d") as durable:
        assert [event.payload for event in await take(durable, 101, 10)] == [b"seen"] + [b"missed"] * 100
        await publisher.publish(b"new")
        assert [event.payload for event in await take(plain, 1, 5)] == [b"new"]


@on_every_wire
async def test_two_sinks_record_each_other_without_a_loop(buses: Buses) -> None:
    one, two = await buses.open("one", keep=["**"]), await buses.open("two", keep=["**"])
    for bus in (one, two):
        await wanted(bus, KEY)
        await (await bus.publisher(KEY)).publish_many([b""] * 300)

    async def stored(bus: zbus.Bus) -> list[tuple[int, int]]:
        return [event.identity async for event in bus.replay()]

    for bus in (one, two):
        async with asyncio.timeout(10):
            while len(await stored(bus)) < 600:
                await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    for bus in (one, two):
        found = await stored(bus)
        assert len(found) == len(set(found)) == 600


async def test_switching_twice_at_the_same_time_ends_on_working_transports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("z", "n", "q"):
        (tmp_path / name).mkdir()
    async with (
        buses_on(Zmq, tmp_path / "z", monkeypatch) as old,
        buses_on(Nats, tmp_path / "n", monkeypatch) as new,
        buses_on(Zmq, tmp_path / "q", monkeypatch) as other,
    ):
        a, b = await old.open("a"), await new.open("b", log=False)
        async with b.subscribe(KEY) as subscription:
            await asyncio.gather(
                a.switch_transport(other.wire.url, overlap_s=0.3), a.switch_transport(new.wire.url, overlap_s=0.3)
            )
            links = [link["fabric"] for link in a.diagnostics()["links"]]
            assert "nats" in links, links
            await (await a.publisher(KEY)).publish(b"after")
            assert [event.payload for event in await take(subscription, 1, 5)] == [b"after"]


async def test_a_peer_that_listens_can_switch_to_a_router(
    buses: Buses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "router").mkdir()
    async with buses_on(ZenohRouter, tmp_path / "router", monkeypatch) as new:
        a, b = await buses.open("a"), await new.open("b", log=False)
        async with b.subscribe(KEY) as subscription:
            await a.switch_transport(new.wire.url, overlap_s=0.2)
            await (await a.publisher(KEY)).publish(b"after")
            assert [event.payload for event in await take(subscription, 1, 5)] == [b"after"]
