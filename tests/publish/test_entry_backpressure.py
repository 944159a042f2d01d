"""Backpressure on the publish path: every path waits, in order, and what changes during the wait is checked again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from publish_paths import BAD, GOOD, IN_PROCESS, KEY, PATHS, SCHEMA, Denies, Rig, rejected_by, rig, until

import zbus
import zbus_log
from zbus.ports.log import Row

PUBLISHERS = 1000


def log_of(path: str, log_path: Path) -> Path | str:
    return log_path if path == "proxied write" else "memory"


@pytest.mark.parametrize("log", [None, "memory"])
async def test_put_waits_for_a_full_subscription_as_publish_does(log: str | None) -> None:
    async with zbus.open(log) as bus, bus.subscribe("a/b", queue_events=10, overflow="block") as full:
        async with asyncio.timeout(10):
            for sequence in range(10):
                await bus.put(zbus.Event(7, sequence, 1, "a/b", b"x"))

        waiting = asyncio.create_task(bus.put(zbus.Event(7, 10, 1, "a/b", b"x")))
        await asyncio.sleep(0.1)
        assert (waiting.done(), full.queued) == (False, 10)

        read = [(await anext(full)).sequence for _ in range(10)]
        await asyncio.wait_for(waiting, 10)
        read.append((await anext(full)).sequence)

    assert read == list(range(11))


async def test_put_of_many_events_without_a_log_waits_for_each_of_them() -> None:
    async with zbus.open() as bus, bus.subscribe("a/b", queue_events=10, overflow="block") as full:
        events = [zbus.Event(7, sequence, 1, "a/b", b"x") for sequence in range(100)]
        putting = asyncio.create_task(bus.put(*events))
        await asyncio.sleep(0.05)
        assert full.queued == 10

        read = [(await anext(full)).sequence for _ in range(100)]

        assert read == list(range(100))
        assert await asyncio.wait_for(putting, 10) == [0] * 100


@asynccontextmanager
async def waiting(path: str, bus: Rig) -> AsyncIterator[asyncio.Task[Any]]:
    """A path that waits for a full subscription. It goes on after the block."""
    await PATHS[path](bus, GOOD, None)
    await bus.fill()
    task = asyncio.ensure_future(PATHS[path](bus, BAD, None))
    await until(lambda: bus.entry.backpressure._waiters)
    assert not task.done()
    yield task
    await bus.free()


@pytest.mark.parametrize("path", PATHS)
async def test_a_schema_that_is_registered_during_the_wait_is_enforced(path: str, log_path: Path) -> None:
    async with rig(log_of(path, log_path)) as bus:
        async with waiting(path, bus) as task:
            await bus.bus.schemas.register(f"**/{KEY}", SCHEMA)

        assert await rejected_by(task) == "schema"
        assert len(await bus.stored()) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_transport_that_is_added_during_the_wait_checks_the_key_too(path: str, log_path: Path) -> None:
    async with rig(log_of(path, log_path)) as bus:
        async with waiting(path, bus) as task:
            await bus.node.link("refuses")

        assert await rejected_by(task) == "key"
        assert len(await bus.stored()) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_access_that_is_denied_during_the_wait_is_denied(path: str, log_path: Path) -> None:
    async with rig(log_of(path, log_path)) as bus:
        async with waiting(path, bus) as task:
            bus.entry.access = Denies()

        assert await rejected_by(task) == "access"
        assert len(await bus.stored()) == 1


@pytest.mark.parametrize("log", [None, "memory"])
@pytest.mark.parametrize("path", IN_PROCESS)
async def test_a_publisher_made_before_a_switch_is_checked_against_the_keys_of_the_new_transport(
    path: str, log: str | None
) -> None:
    async with rig(log) as bus:
        await PATHS[path](bus, GOOD, None)

        await bus.bus.switch_transport("refuses", overlap_s=0)

        assert await rejected_by(PATHS[path](bus, GOOD, None)) == "key"
        assert len(await bus.stored()) == 1


@pytest.mark.parametrize("log", [None, "memory"])
async def test_publish_many_stores_nothing_of_a_part_that_it_rejects_and_uses_up_no_sequence(log: str | None) -> None:
    async with zbus.open(log) as bus, bus.subscribe("**") as subscription:
        publisher = await bus.publisher("a/b")

        with pytest.raises(zbus.PayloadInvalid):
            await publisher.publish_many([b"1", b"2", object()])
        assert (publisher.sequence, subscription.queued) == (0, 0)

        await publisher.publish(b"3")
        assert (await anext(subscription)).sequence == 0


# Several keys at once: each of these needs room for both.


async def put_both(bus: zbus.Bus, log: Path) -> None:
    await bus.put(zbus.Event(7, 0, 1, "k/x", b""), zbus.Event(7, 1, 1, "sessions/s/k/x", b""))


async def session_both(bus: zbus.Bus, log: Path) -> None:
    await bus.session("s").publish("k/x", b"")


async def proxy_both(bus: zbus.Bus, log: Path) -> None:
    rows = [Row(7, 0, 1, "k/x", b"", None), Row(7, 1, 1, "sessions/s/k/x", b"", None)]
    await asyncio.to_thread(zbus_log.put, log, [rows])


@pytest.mark.parametrize("both", [put_both, session_both, proxy_both])
async def test_events_of_two_keys_wait_until_there_is_room_for_both_at_once(
    both: Callable[[zbus.Bus, Path], Any], log_path: Path
) -> None:
    async with zbus.open(log_path, durability="os") as bus:
        first = bus.subscribe("k/x", "fill/first", queue_events=1, overflow="block")
        second = bus.subscribe("sessions/s/k/x", "fill/second", queue_events=1, overflow="block")
        fillers = [await bus.publisher("fill/first"), await bus.publisher("fill/second")]
        for filler in fillers:
            await filler.publish(b"")
        before = await bus.head()
        sending = asyncio.ensure_future(both(bus, log_path))
        await asyncio.sleep(0.1)

        await anext(first)
        await asyncio.sleep(0.02)
        await fillers[0].publish(b"")  # the first is full again before the second has room
        await anext(second)
        await asyncio.sleep(0.1)
        assert not sending.done()
        assert await bus.head() == before + 1

        await anext(first)
        await asyncio.wait_for(sending, 10)
        assert ((await anext(first)).key, (await anext(second)).key) == ("k/x", "sessions/s/k/x")


# Arrival order.


@pytest.mark.parametrize("log", [None, "memory"])
async def test_publishers_that_wait_are_served_in_order_and_before_those_that_come_later(log: str | None) -> None:
    async with zbus.open(log) as bus, bus.subscribe("a/*", queue_events=4, overflow="block") as full:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b"full"] * 4)
        early = [asyncio.create_task((await bus.publisher(f"a/{n}")).publish(b"early")) for n in range(50)]
        await asyncio.sleep(0.05)

        for _ in range(4):
            assert (await anext(full)).payload == b"full"
        late = asyncio.create_task(publisher.publish(b"late"))  # in the very turn in which there is room again
        read = [await anext(full) for _ in range(51)]
        await asyncio.gather(*early, late)

    assert [event.key for event in read] == [*(f"a/{n}" for n in range(50)), "a/b"]


@pytest.mark.parametrize("log", [None, "memory"])
async def test_the_events_of_one_publisher_keep_their_order_when_the_wait_ends(log: str | None) -> None:
    async with zbus.open(log) as bus, bus.subscribe("a/*", queue_events=4, overflow="block") as full:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b"full"] * 4)
        first = asyncio.create_task(publisher.publish(b"first"))
        await asyncio.sleep(0.05)
        for _ in range(4):
            await anext(full)
        second = asyncio.create_task(publisher.publish(b"second"))

        read = [((await anext(full)).payload) for _ in range(2)]
        await asyncio.gather(first, second)

    assert read == [b"first", b"second"]


async def test_a_queue_that_blocks_is_never_exceeded_by_those_that_wait() -> None:
    async with zbus.open() as bus, bus.subscribe("a/*", queue_events=10, overflow="block") as full:
        tasks = [asyncio.create_task((await bus.publisher("a/b")).publish(b"")) for _ in range(200)]
        most = 0
        for _ in range(200):
            await anext(full)
            most = max(most, full.queued)
        await asyncio.gather(*tasks)

    assert most <= 10


@pytest.mark.parametrize("log", [None, "memory"])
async def test_a_thousand_publishers_that_wait_are_released_promptly(log: str | None) -> None:
    async with zbus.open(log) as bus, bus.subscribe("a/*", queue_events=PUBLISHERS, overflow="block") as full:
        await (await bus.publisher("a/b")).publish_many([b""] * PUBLISHERS)
        tasks = [asyncio.create_task((await bus.publisher("a/b")).publish(b"")) for _ in range(PUBLISHERS)]
        await until(lambda: len(node_of(bus).backpressure._waiters) == PUBLISHERS)

        began = time.process_time()
        for _ in range(2 * PUBLISHERS):
            await anext(full)
        await asyncio.gather(*tasks)

        assert time.process_time() - began < 2.0  # it takes 20 ms
