"""`next_batch`, `wake` and `position`: bursts, a subscriber that can be woken, and where another would resume.

Where events are traced each is taken by itself, and whether they are depends on what other tests have imported.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import zbus


async def test_take_hands_over_what_waits_in_order_and_no_more_than_requested(log_path: Path) -> None:
    async with zbus.open(log_path, tracing="off") as bus, bus.subscribe("a") as sub:
        await (await bus.publisher("a")).publish_many([b"%d" % number for number in range(10)])
        first = await sub.next_batch(4)
        rest = await sub.next_batch()
        assert first is not None
        assert rest is not None
        assert [event.offset for event in first + rest] == list(range(1, 11))
        assert len(first) == 4
        assert sub.position == 10


async def test_take_waits_for_the_next_burst_and_reads_on_from_the_log(log_path: Path) -> None:
    async with zbus.open(log_path, tracing="off") as bus:
        publisher = await bus.publisher("a")
        await publisher.publish_many([b""] * 5)
        async with bus.subscribe("a", start="beginning", overflow="spill", queue_events=2) as sub:
            seen: list[int] = []
            while len(seen) < 5:
                seen += [event.offset for event in await sub.next_batch() or ()]
            waiting = asyncio.ensure_future(sub.next_batch())
            await asyncio.sleep(0)
            await publisher.publish_many([b""] * 7)
            seen += [event.offset for event in await waiting or ()]
            while len(seen) < 12:
                seen += [event.offset for event in await sub.next_batch() or ()]
            assert seen == list(range(1, 13))


async def test_a_small_queue_reads_small_pages(log_path: Path) -> None:
    async with zbus.open(log_path, tracing="off") as bus:
        await (await bus.publisher("a")).publish_many([b""] * 3000)
    async with zbus.open(log_path, tracing="off") as bus:
        async with bus.subscribe("a", start="beginning", overflow="spill", queue_events=10) as sub:
            assert [event.offset for event in await sub.next_batch(1) or ()] == [1]
            assert sub.queued <= 127
            seen = 1
            while seen < 3000:
                seen += len(await sub.next_batch() or ())
            assert sub.position == 3000


async def test_wake_returns_once_even_if_no_task_waits_yet_and_never_hides_events(log_path: Path) -> None:
    async with zbus.open(log_path, tracing="off") as bus, bus.subscribe("a") as sub:
        waiting = asyncio.ensure_future(sub.next_batch())
        await asyncio.sleep(0)
        sub.wake()
        assert await waiting == []
        sub.wake()
        assert await sub.next_batch() == []
        sub.wake()
        await (await bus.publisher("a")).publish(b"x")
        assert [event.offset for event in await sub.next_batch() or ()] == [1]
        waiting = asyncio.ensure_future(sub.next_batch())
        await asyncio.sleep(0)
        assert not waiting.done()
        await sub.aclose()
        assert await waiting is None


async def test_the_position_moves_past_what_others_requested_and_never_past_what_is_queued(log_path: Path) -> None:
    async with zbus.open(log_path, tracing="off") as bus:
        rare, often = await bus.publisher("rare"), await bus.publisher("often")
        async with bus.subscribe("rare", overflow="spill", queue_events=2) as sub:
            await often.publish_many([b""] * 5)
            assert sub.position == 5
            await rare.publish_many([b""] * 4)  # spills: two are queued, two are in the log
            assert sub.position < 6
            assert [event.offset for event in await sub.next_batch() or ()] == [6, 7]
            assert sub.position == 7
            await often.publish_many([b""] * 5)
            seen = [event.offset for event in await sub.next_batch() or ()]
            assert seen == [8, 9]
            assert sub.position >= 9
            sub.wake()
            assert await sub.next_batch() == []
            async with bus.subscribe("rare", start=sub.position + 1) as other:
                (offset,) = await rare.publish_many([b""])
                assert [event.offset for event in await other.next_batch() or ()] == [offset]


async def test_events_that_a_durable_name_takes_are_acknowledged_one_by_one(log_path: Path) -> None:
    async with zbus.open(log_path, tracing="off") as bus:
        await (await bus.publisher("a")).publish_many([b""] * 3)
        async with bus.subscribe("a", durable="d", start="beginning") as sub:
            for offset in (1, 2, 3):
                assert [event.offset for event in await sub.next_batch() or ()] == [offset]
        async with bus.subscribe("a", durable="d") as sub:
            assert [event.offset for event in await sub.next_batch() or ()] == [3]  # handed over, not acknowledged
