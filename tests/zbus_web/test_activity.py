"""Exact counts per key and publisher in bounded memory, rates, and log records of problems."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zbus
import zbus.observe.records
from zbus.observe.records import EVENT_DROPPED, EVENT_GAP, record
from zbus.ports.log import Row
from zbus_web.introspect.activity import OVER_S, QUEUED_BYTES_MAX, QUEUED_EVENTS_MAX, Activity
from zbus_web.introspect.log_records import RECORD_BYTES_MAX, RECORDS_MAX, ProblemRecords


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def everything(key: str) -> bool:
    return True


def row(key: str, publisher: int = 7, sequence: int = 0, payload: bytes = b"xx", at: int = 1) -> Row:
    return Row(publisher, sequence, at, key, payload, None)


async def test_every_stored_event_is_counted_by_key_and_publisher(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        activity = Activity(bus)
        first, second = await bus.publisher("a/b"), await bus.publisher("a/b")
        await first.publish_many([b"xyz"] * 1500)
        await second.publish(b"1")
        await (await bus.publisher("c")).publish(b"")

        assert [(each.key, each.events, each.bytes) for each in activity.topics(everything)] == [
            ("a/b", 1501, 4501),
            ("c", 1, 0),
        ]
        assert {
            (each.key, each.publisher_id, each.sequence, each.events) for each in activity.publishers(everything)
        } >= {
            ("a/b", first.publisher_id, 1499, 1500),
            ("a/b", second.publisher_id, 0, 1),
        }
        assert [each.key for each in activity.topics(lambda key: key == "c")] == ["c"]
        assert len(activity.topics(everything, limit=1)) == 1
        activity.close()
        await second.publish(b"2")
        assert activity.topics(everything)[0].events == 1501
        activity.close()


async def test_events_published_without_a_log_are_counted_too() -> None:
    async with zbus.open() as bus:
        activity = Activity(bus)
        await (await bus.publisher("a")).publish_many([b"1", b"22"])

        assert [(each.key, each.events, each.bytes) for each in activity.topics(everything)] == [("a", 2, 3)]
        activity.close()


async def test_a_duplicate_event_is_counted_once(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        activity = Activity(bus)
        event = zbus.Event(9, 0, 1, "a", b"1")
        await bus.put(event)
        await bus.put(event)

        assert [(each.key, each.events) for each in activity.topics(everything)] == [("a", 1)]
        activity.close()


async def test_a_log_of_another_process_is_followed_while_it_is_viewed(log_path: Path) -> None:
    async with zbus.open(log_path) as owner:
        publisher = await owner.publisher("a/b")
        await publisher.publish(b"before")
        async with zbus.open(log_path, read_only=True) as bus:
            activity = Activity(bus)
            await publisher.publish_many([b"xyz"] * 1500)

            async def seen() -> int:
                await asyncio.gather(activity.follow(), activity.follow())
                return sum(each.events for each in activity.topics(everything))

            async with asyncio.timeout(30):
                while await seen() < 1500:
                    await asyncio.sleep(0.02)
            (topic,) = activity.topics(everything)
            assert (topic.key, topic.events, topic.bytes) == ("a/b", 1500, 4500)
            assert activity.publishers(everything)[0].sequence == 1500
            activity.close()


bursts = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abcdefghijklm"), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=8
    ),
    max_size=30,
)


@settings(max_examples=100)
@given(bursts)
def test_the_sum_of_all_counts_is_exact_and_the_tables_are_bounded(
    drawn: list[list[tuple[str, int, bytes]]],
) -> None:
    clock = Clock()
    activity = _alone(clock, keys_max=5, publishers_max=7)
    seen = size = 0
    for burst in drawn:
        clock.now += 1
        rows = [row(key, publisher, payload=payload) for key, publisher, payload in burst]
        activity.add(rows, sum(len(each.payload) for each in rows))
        seen += len(rows)
        size += sum(len(each.payload) for each in rows)
        topics = activity.topics(everything)
        others, other_events, other_bytes = activity.other

        assert len(topics) <= 5
        assert len(activity.publishers(everything)) <= 7
        assert sum(each.events for each in topics) + other_events == seen
        assert sum(each.bytes for each in topics) + other_bytes == size
        assert (others == 0) == (other_events == 0)
        if len({key for key, _, _ in burst}) <= 5:  # The longest idle keys are evicted, never the latest ones.
            assert {key for key, _, _ in burst} <= {each.key for each in topics}


@settings(max_examples=100)
@given(bursts)
def test_counting_many_bursts_at_once_equals_counting_each(
    drawn: list[list[tuple[str, int, bytes]]],
) -> None:
    activity = _alone(Clock())
    expected: Counter[str] = Counter()
    last: dict[tuple[str, int], int] = {}
    for number, burst in enumerate(drawn):
        activity.add([row(key, publisher, number) for key, publisher, _ in burst], 2 * len(burst))
        expected.update(key for key, _, _ in burst)
        last |= {(key, publisher): number for key, publisher, _ in burst}

    assert {each.key: each.events for each in activity.topics(everything)} == expected
    assert {(each.key, each.publisher_id): each.sequence for each in activity.publishers(everything)} == last


def test_the_queue_of_uncounted_bursts_is_bounded() -> None:
    activity = _alone(Clock())
    for number in range(QUEUED_EVENTS_MAX * 3):
        activity.add([row("a", sequence=number)], 2)
        assert activity._queued_events < QUEUED_EVENTS_MAX
    large = b"x" * (QUEUED_BYTES_MAX // 4)
    for _ in range(20):
        activity.add([row("b", payload=large)], len(large))
        assert activity._queued_bytes < QUEUED_BYTES_MAX

    assert {each.key: each.events for each in activity.topics(everything)} == {"a": QUEUED_EVENTS_MAX * 3, "b": 20}


def test_a_steady_rate_is_exact_and_decays_after_it_ends() -> None:
    clock = Clock()
    activity = _alone(clock)
    for _ in range(600):
        clock.now += 0.1
        activity.add([row("a")] * 10, 20)

    assert activity.topics(everything)[0].events_per_s == pytest.approx(100, rel=0.05)
    clock.now += OVER_S
    assert activity.topics(everything)[0].events_per_s == pytest.approx(100 / 2.718, rel=0.05)
    clock.now += 10 * OVER_S
    assert activity.topics(everything)[0].events_per_s < 0.1


def test_an_old_uncounted_burst_does_not_raise_the_current_rate() -> None:
    clock = Clock()
    activity = _alone(clock)
    activity.add([row("a")] * 1000, 2000)
    clock.now += 60

    (topic,) = activity.topics(everything)
    assert (topic.events, topic.events_per_s) == (1000, 0.0)


def test_the_busiest_keys_come_first() -> None:
    clock = Clock()
    activity = _alone(clock)
    for number, key in enumerate("abc"):
        activity.add([row(key)] * (number + 1), 2)

    assert [each.key for each in activity.topics(everything, 2)] == ["c", "b"]


def _alone(clock: Clock, **bounds: int) -> Activity:
    """Return an `Activity` of a bus that is not open."""
    activity = Activity(zbus.open(), clock=clock, **bounds)
    activity.close()
    return activity


# Log records.


def listeners() -> tuple[object, ...]:
    return zbus.observe.records._listeners


def test_problem_records_are_bounded_and_the_newest_is_last() -> None:
    records = ProblemRecords()
    try:
        record(EVENT_GAP, logging.INFO, key="quiet")
        for number in range(RECORDS_MAX + 10):
            record(EVENT_DROPPED, logging.WARNING, key="a/b", number=number)

        kept = records.after()
        assert [each["number"] for each in kept] == list(range(10, RECORDS_MAX + 10))
        assert kept[0]["record"] == EVENT_DROPPED
        assert kept[0]["level"] == "WARNING"
        assert kept[0]["at"].startswith("20")
        assert [each["number"] for each in records.after(kept[-3]["id"])] == [RECORDS_MAX + 8, RECORDS_MAX + 9]
        assert records.after(records.last) == []
    finally:
        records.close()
    record(EVENT_DROPPED, logging.WARNING, key="later")
    assert records.after(kept[-1]["id"]) == []


def test_collected_problem_records_no_longer_receive_log_records() -> None:
    before = listeners()
    records = ProblemRecords()
    record(EVENT_DROPPED, logging.WARNING, key="a")
    assert len(records.after()) == 1
    assert len(listeners()) == len(before) + 1
    del records
    gc.collect()

    assert listeners() == before


def test_a_problem_record_has_no_session_id_and_a_bounded_size() -> None:
    records = ProblemRecords()
    try:
        error = ValueError("key 'sessions/alice/x' rejected")
        record(
            EVENT_DROPPED,
            logging.ERROR,
            error,
            keys=["sessions/al'ice/**", 'sessions/b"ob'],
            deep={"k": "sessions/zoë"},
        )
        record(EVENT_DROPPED, logging.ERROR, text="x" * RECORD_BYTES_MAX, odd=object())

        first, second = records.after()
        assert first["keys"] == ["sessions/…/**", "sessions/…"]
        assert first["deep"] == {"k": "sessions/…"}
        assert not [name for name in ("alice", "ice", "ob", "zoë") if name in str(first)]
        assert set(second) == {"id", "at", "level", "record", "left_out"}
    finally:
        records.close()
