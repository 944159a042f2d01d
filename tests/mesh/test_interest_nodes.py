"""Several readers of one node, with and without a log, coming and going: none sees an event twice, none misses one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inside import node_of
from mesh_lossy import WAIT_S, Buses, buses_on, eventually, nothing_more, take, wanted
from mesh_support import ZenohPeers

import zbus

KEY = "shop/orders"


@pytest.fixture
async def buses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Buses]:
    async with buses_on(ZenohPeers, tmp_path, monkeypatch) as found:
        yield found


async def reported(listener: zbus.Bus, speaker: zbus.Bus) -> None:
    """Wait until one bus has received a beacon about everything that the other has sent so far."""
    assert node_of(listener).network is not None
    assert node_of(speaker).network is not None
    origin, head, known_logs = (
        node_of(speaker).network.origin,
        node_of(speaker).network.head,
        node_of(listener).network.inbox.known_logs,
    )
    await eventually(lambda: max(known_logs.of(origin).values(), default=0) >= head)


async def unwanted(bus: zbus.Bus, key: str) -> None:
    """Until this bus knows that no other node wants `key` any more."""
    assert node_of(bus).network is not None
    async with asyncio.timeout(WAIT_S):
        while await node_of(bus).run(node_of(bus).network.links[0].fabric.ready, key):
            await asyncio.sleep(0.005)


async def test_a_plain_reader_sees_nothing_twice_when_a_durable_one_fetches_the_past(buses: Buses) -> None:
    a, b = await buses.open("a"), await buses.open("b")
    async with b.subscribe(KEY) as plain:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publisher.publish_many([b""] * 10)
        assert [event.sequence for event in await take(plain, 10)] == list(range(10))
        async with b.subscribe(KEY, durable="d", start="beginning") as durable:
            assert [event.sequence for event in await take(durable, 10, 5)] == list(range(10))
            await publisher.publish(b"")
            assert [event.sequence for event in await take(durable, 1, 5)] == [10]
            assert [event.sequence for event in await take(plain, 1, 5)] == [10]
            await nothing_more(plain)
            await nothing_more(durable)


async def test_a_durable_name_that_is_left_and_taken_again_at_once_misses_nothing(buses: Buses) -> None:
    a, b = await buses.open("a"), await buses.open("b")
    publisher = await a.publisher(KEY)
    async with b.subscribe("other", KEY + "/x"):  # so that the nodes hear of each other all the time
        async with b.subscribe(KEY, durable="d") as durable:
            await wanted(a, KEY)
            await publisher.publish(b"")
            assert [event.sequence for event in await take(durable, 1)] == [0]
        await publisher.publish_many([b""] * 5)
        await reported(b, a)
        async with b.subscribe(KEY, durable="d") as durable:
            events = await take(durable, 6, 4)
            assert [event.sequence for event in events if event.sequence] == [1, 2, 3, 4, 5]


async def test_a_durable_name_that_is_left_for_a_while_misses_nothing(buses: Buses) -> None:
    a, b = await buses.open("a"), await buses.open("b")
    publisher = await a.publisher(KEY)
    async with b.subscribe(KEY, durable="d") as durable:
        await wanted(a, KEY)
        await publisher.publish(b"")
        assert [event.sequence for event in await take(durable, 1)] == [0]
    await reported(b, a)
    await publisher.publish_many([b""] * 5)
    await reported(b, a)
    async with b.subscribe(KEY, durable="d") as durable:
        events = await take(durable, 6, 4)
        assert [event.sequence for event in events if event.sequence] == [1, 2, 3, 4, 5]


async def test_a_reader_of_what_is_new_sees_nothing_from_before_it_came(buses: Buses) -> None:
    a, b = await buses.open("a"), await buses.open("b")
    publisher = await a.publisher(KEY)
    async with b.subscribe(KEY, overflow="spill") as subscription:
        await wanted(a, KEY)
        await publisher.publish(b"")
        assert await take(subscription, 1)
    await unwanted(a, KEY)
    await publisher.publish_many([b"old"] * 5)
    await reported(b, a)
    async with b.subscribe(KEY, overflow="spill") as subscription:
        await wanted(a, KEY)
        await publisher.publish(b"new")
        assert [event.payload for event in await take(subscription, 1, 5)] == [b"new"]
        await nothing_more(subscription)


async def test_a_durable_start_at_the_beginning_right_after_opening_gets_the_whole_past(buses: Buses) -> None:
    a = await buses.open("a")
    publisher = await a.publisher(KEY)
    await publisher.publish_many([b""] * 3_000)
    b = await buses.open("b")
    async with b.subscribe(KEY, durable="d", start="beginning") as durable:
        assert [event.sequence for event in await take(durable, 3_000, 10)] == list(range(3_000))
        await nothing_more(durable)


async def test_a_durable_start_at_the_beginning_while_another_reader_catches_up_gets_the_whole_past(
    buses: Buses,
) -> None:
    a = await buses.open("a")
    early, late = await a.publisher("shop/early"), await a.publisher("shop/late")
    for _ in range(10):
        await early.publish_many([b""] * 1_000)
        await late.publish_many([b""] * 1_000)
    b = await buses.open("b")
    async with b.subscribe("shop/early", durable="early", start="beginning") as first:
        assert (await take(first, 1, 10))[0].sequence == 0  # the repair is under way
        async with b.subscribe("shop/late", durable="late", start="beginning") as second:
            assert [event.sequence for event in await take(second, 10_000, 15)] == list(range(10_000))
            await nothing_more(second)
        assert [event.sequence for event in await take(first, 9_999, 15)] == list(range(1, 10_000))


async def test_overlapping_expressions_bring_each_event_once(buses: Buses) -> None:
    a, b = await buses.open("a"), await buses.open("b")
    async with b.subscribe("shop/**", "*/orders", KEY) as one, b.subscribe("**", overflow="spill") as two:
        async with b.subscribe("*/orders", durable="d") as three:
            await wanted(a, KEY)
            publisher = await a.publisher(KEY)
            await publisher.publish_many([b""] * 500)
            for subscription in (one, two, three):
                assert [event.sequence for event in await take(subscription, 500)] == list(range(500))
                await nothing_more(subscription, 0.2)
