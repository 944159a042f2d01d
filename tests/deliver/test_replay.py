"""Replay from the log alone, and the seam between replay and live events under full load."""

from __future__ import annotations

import asyncio
import datetime
import time
from pathlib import Path

import pytest

import zbus
import zbus_log
from zbus.ports.log import Row


async def test_replay_is_bounded_by_offsets_on_both_sides_and_by_keys(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        for key in ("a/x", "b/x"):
            await (await bus.publisher(key)).publish_many([b""] * 10)

        assert [event.offset async for event in bus.replay(after=3, until=6)] == [4, 5, 6]
        assert [event.offset async for event in bus.replay("b/*", after=3)] == list(range(11, 21))
        assert [event.offset async for event in bus.replay("b/*", "a/**", until=12)] == list(range(1, 13))
        assert [event.offset async for event in bus.replay("nobody/**")] == []


@pytest.mark.parametrize("page_events", [1, 2, 3, 2000])
async def test_replay_returns_every_event_between_its_bounds_however_its_pages_end(
    log_path: Path, page_events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus.deliver.replay.PAGE_EVENTS", page_events)
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/x")).publish_many([b""] * 7)
        found = {
            (after, until): [event.offset async for event in bus.replay(after=after, until=until)]
            for after in range(8)
            for until in range(after, 9)
        }

    assert found == {(after, until): list(range(after + 1, min(until, 7) + 1)) for after, until in found}


async def test_a_time_after_which_to_replay_is_excluded_and_a_time_until_is_included(log_path: Path) -> None:
    first = 1_700_000_000_000_000_000
    zbus_log.put(log_path, [[Row(7, n, first + n * 1000, "a/x", b"", None) for n in range(5)]])
    times = [datetime.datetime.fromtimestamp(first // 10**9, datetime.UTC).replace(microsecond=n) for n in range(5)]
    async with zbus.open(log_path) as bus:
        assert [event.sequence async for event in bus.replay(after=times[1])] == [2, 3, 4]
        assert [event.sequence async for event in bus.replay(until=times[3])] == [0, 1, 2, 3]
        assert [event.sequence async for event in bus.replay(after=times[1], until=times[3])] == [2, 3]


async def test_replay_by_time_returns_exactly_what_was_published_in_between(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/x")
        marks = []
        for _ in range(3):
            marks.append(datetime.datetime.now(datetime.UTC))
            await _next_microsecond()
            await publisher.publish_many([b""] * 1500)
            await _next_microsecond()

        middle = [event.offset async for event in bus.replay(after=marks[1], until=marks[2])]
        last = [event.offset async for event in bus.replay(after=marks[2])]

    assert middle == list(range(1501, 3001))
    assert last == list(range(3001, 4501))


async def _next_microsecond() -> None:
    now = time.time_ns() // 1000
    while time.time_ns() // 1000 <= now + 1:
        await asyncio.sleep(0)


async def test_replay_ends_at_the_head_of_the_moment_it_began(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/x")
        await publisher.publish_many([b""] * 600)
        replay = bus.replay()
        first = await anext(replay)
        await publisher.publish_many([b""] * 600)

        rest = [event.offset async for event in replay]

    assert [first.offset, *rest] == list(range(1, 601))


async def test_replay_to_live_under_full_load_misses_none_and_repeats_none(log_path: Path) -> None:
    """Publishers never stop; subscriptions start in the past at random moments and switch to live events."""
    total, publishers = 60_000, 64
    async with zbus.open(log_path) as bus:
        published = 0

        async def publish(number: int) -> None:
            nonlocal published
            publisher = await bus.publisher(f"load/{number % 8}/x")
            while published < total:
                published += 1
                await publisher.publish(b"%d" % published)

        async def follow(after: int) -> tuple[list[zbus.Event], bool]:
            while published < after:
                await asyncio.sleep(0)
            async with bus.subscribe("**", start="beginning", overflow="spill", queue_events=200) as subscription:
                events, was_live = [], False
                async for event in subscription:
                    events.append(event)
                    was_live = was_live or subscription.is_live
                    if event.key == "end/x/x":
                        return events, was_live
            raise AssertionError("the stream ended")

        followers = [asyncio.create_task(follow(after)) for after in (0, 20_000, 50_000, 59_000)]
        async with asyncio.timeout(100):
            await asyncio.gather(*[publish(number) for number in range(publishers)])
            await (await bus.publisher("end/x/x")).publish(b"")
            head = await bus.head()
            for follower in followers:
                events, was_live = await follower
                assert [event.offset for event in events] == list(range(1, head + 1))
                assert was_live


async def test_replay_to_live_of_some_keys_under_load_misses_none_and_repeats_none(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        rare, common = await bus.publisher("rare/x"), await bus.publisher("common/x")
        await rare.publish_many([b""] * 500)
        await common.publish_many([b""] * 20_000)

        async def publish() -> None:
            for _ in range(100):
                await common.publish_many([b""] * 200)
                await rare.publish(b"")

        async with bus.subscribe("rare/**", start="beginning", overflow="spill", queue_events=5) as subscription:
            publishing = asyncio.create_task(publish())
            async with asyncio.timeout(60):
                seen = [(await anext(subscription)).sequence for _ in range(600)]
            await publishing

    assert seen == list(range(600))


async def store_with_a_corrupt_event(log_path: Path, offset: int) -> None:
    from zbus_log.file import sqlite_driver

    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/x")).publish_many([b"%d" % n for n in range(5)])
    connection = sqlite_driver.connect(log_path)
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.execute("UPDATE events SET payload = x'00' WHERE offset = ?", (offset,))
    connection.commit()
    connection.close()


@pytest.mark.parametrize("corrupt", [1, 2, 3, 5])
async def test_a_corrupt_event_is_never_passed_over_wherever_its_page_begins(
    log_path: Path, corrupt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus.deliver.replay.PAGE_EVENTS", 2)
    await store_with_a_corrupt_event(log_path, corrupt)
    async with zbus.open(log_path) as bus:
        replay = bus.replay()
        assert [(await anext(replay)).offset for _ in range(corrupt - 1)] == list(range(1, corrupt))
        for _ in range(3):
            with pytest.raises(zbus.EventCorrupt) as caught:
                await anext(replay)
            assert caught.value.offset == corrupt


async def test_a_corrupt_event_is_reported_with_its_offset_and_skipped_only_on_request(log_path: Path) -> None:
    await store_with_a_corrupt_event(log_path, 3)

    async with zbus.open(log_path) as bus:
        replay = bus.replay()
        assert [(await anext(replay)).offset for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(zbus.EventCorrupt) as caught:
                await anext(replay)
            assert caught.value.offset == 3
        assert [event.offset async for event in bus.replay(skip_corrupt=True)] == [1, 2, 4, 5]
        assert bus.stats()["corrupt_skipped"] == 1
        async with bus.subscribe("**", start="beginning") as subscription:
            assert [(await anext(subscription)).offset for _ in range(2)] == [1, 2]
            with pytest.raises(zbus.EventCorrupt):
                await anext(subscription)


async def test_a_bound_that_is_none_is_refused_and_a_far_one_is_a_bound(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/x")).publish_many([b""] * 3)
        for wrong in ({"after": -1}, {"after": "x"}, {"until": 1.5}, {"until": True}):
            with pytest.raises(zbus.ConfigInvalid, match=next(iter(wrong))):
                bus.replay(**wrong)  # type: ignore[arg-type]
        far, long_ago = (
            datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC),
            datetime.datetime(1, 1, 2, tzinfo=datetime.UTC),
        )

        assert [event.offset async for event in bus.replay(after=long_ago, until=far)] == [1, 2, 3]
        assert [event.offset async for event in bus.replay(after=far)] == []
