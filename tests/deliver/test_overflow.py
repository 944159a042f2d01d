"""Overflow policies: every event is handed over or reported as missed, and no queue exceeds its capacity."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from deliver_support import KEY, FakeHost, FakeLog, soon, waits
from hypothesis import given, settings
from hypothesis import strategies as st

import zbus
from zbus.deliver import overflow, subscriber
from zbus.deliver.buffer import EVENT_BYTES
from zbus.deliver.overflow import POLICIES, REPORT_EVERY_S, Overflow, Policy
from zbus.deliver.subscriber import EventSubscriber
from zbus.observe.records import EVENT_BACKPRESSURE, EVENT_DROPPED, EVENT_SUBSCRIBER_SLOW

ROOM_BYTES = 10 * EVENT_BYTES  # ten events without a payload


@pytest.fixture
def small_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "BACKLOG_BYTES_MAX", ROOM_BYTES)
    monkeypatch.setattr(subscriber, "BACKLOG_BYTES_MAX", ROOM_BYTES)


def records_of(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [getattr(each, "zbus", {}) for each in caplog.records if each.name == "zbus"]
    return [each for each in found if each.get("record") == name]


class Reader:
    """Reads a subscription and keeps account of what came and what was missed."""

    def __init__(self, subscription: EventSubscriber) -> None:
        self.subscription = subscription
        self.seen: list[tuple[int, int]] = []
        self.missed = 0
        self.lags: list[zbus.SubscriberLagged] = []

    async def read(self, most: int) -> None:
        """Read at most so many events; fewer, if no more come."""
        for _ in range(most):
            try:
                event = await soon(self.subscription)
            except zbus.SubscriberLagged as lag:
                self.missed += lag.missed
                self.lags.append(lag)
                continue
            if event is None:
                return
            self.seen.append(event.identity)

    async def read_all(self) -> None:
        before = -1
        while len(self.seen) + self.missed != before:
            before = len(self.seen) + self.missed
            await self.read(1000)

    def check_order(self) -> None:
        for publisher in {publisher for publisher, _ in self.seen}:
            sequences = [sequence for each, sequence in self.seen if each == publisher]
            assert sequences == sorted(set(sequences)), "nothing comes twice or out of order"


async def test_a_queue_that_drops_the_newest_stays_within_its_capacity_and_counts_what_it_drops() -> None:
    async with zbus.open("memory") as bus, bus.subscribe("a/b", queue_events=4, overflow="drop_newest") as subscription:
        publisher = await bus.publisher("a/b")
        for _ in range(6):
            await publisher.publish_many([b"x"] * 50)
            assert subscription.queued == 4
        handed = missed = 0
        while subscription.queued or handed + missed < 300:
            try:
                assert await subscription.next() is not None
                handed += 1
            except zbus.SubscriberLagged as gap:
                missed += gap.missed

        assert (handed, missed, subscription.dropped) == (4, 296, 296)
        assert bus.stats()["dropped_queue_full"] == 296


steps = st.lists(
    st.tuples(st.sampled_from(["publish", "receive", "read"]), st.integers(1, 30)), min_size=1, max_size=40
)


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("logged", [True, False], ids=["log", "no-log"])
@settings(max_examples=150)
@given(steps=steps, capacity=st.integers(1, 9), step=st.sampled_from([1, 3]), late=st.booleans())
def test_every_event_is_handed_over_or_reported_as_missed(
    name: Overflow, logged: bool, steps: list[tuple[str, int]], capacity: int, step: int, late: bool
) -> None:
    if name == "spill" and not logged:
        return  # refused: see test_subscriber.py
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overflow, "BACKLOG_BYTES_MAX", ROOM_BYTES)
        patch.setattr(subscriber, "BACKLOG_BYTES_MAX", ROOM_BYTES)
        asyncio.run(_account(name, FakeLog(step) if logged else None, steps, capacity, late))


async def _account(
    name: Overflow, log: FakeLog | None, steps: list[tuple[str, int]], capacity: int, late: bool
) -> None:
    host = FakeHost(log)
    subscription = host.subscribe(
        overflow=name, queue_events=capacity, start="beginning" if late and log is not None else "new"
    )
    reader, sent = Reader(subscription), 0
    buffer = subscription._buffer
    for operation, events in steps:
        if operation == "read":
            await reader.read(events)
        elif operation == "receive":
            host.receive(events)
            sent += events
        elif name == "block" and waits(host):
            continue  # the publishers of this node do not get this far
        elif log is not None:
            host.store(events)
            sent += events
        else:
            host.send(events)
            sent += events
        assert buffer.free >= 0
        if subscription.is_live:
            assert buffer.events <= capacity
        assert buffer.free == max(0, capacity - buffer.events)
    await reader.read_all()

    assert len(reader.seen) + reader.missed == sent
    assert subscription.dropped == reader.missed
    assert sum(host.counts[f"dropped_{code}"] for code in ("queue_full", "backlog_full")) == reader.missed
    assert subscription.queued == 0
    assert not waits(host)
    reader.check_order()
    if not POLICIES[name].drops:
        own = [sequence for publisher, sequence in reader.seen if publisher != 3]
        assert len(own) == sent - host._sequences[3], "nothing that this node published is lost"
    if not POLICIES[name].drops and not host._sequences[3]:
        assert reader.missed == 0
    await subscription.aclose()


@given(bursts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=8))
@settings(max_examples=15)
@pytest.mark.parametrize("log", [None, "memory"])
def test_a_subscription_that_blocks_hands_over_everything_and_publishers_wait(
    log: str | None, bursts: list[tuple[int, int]]
) -> None:
    async def run() -> None:
        async with zbus.open(log) as bus, bus.subscribe(KEY, queue_events=5, overflow="block") as subscription:
            publisher, sent = await bus.publisher(KEY), sum(events for events, _ in bursts)

            async def publish() -> None:
                for events, _ in bursts:
                    await publisher.publish_many([b""] * events)

            publishing = asyncio.create_task(publish())
            seen: list[int] = []
            async with asyncio.timeout(30):
                for _, reads in bursts:
                    for _ in range(min(reads, sent - len(seen))):
                        seen.append((await anext(subscription)).sequence)
                    if len(seen) + 45 < sent:
                        assert not publishing.done()
                while len(seen) < sent:
                    seen.append((await anext(subscription)).sequence)
                await publishing
            assert seen == list(range(sent))
            assert subscription.dropped == 0

    asyncio.run(run())


# Each policy: what is counted and recorded.


async def test_dropped_events_are_counted_each_and_recorded_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost()
    subscription = host.subscribe("a/**", queue_events=2)

    for _ in range(3):
        host.send(4)
    assert (subscription.dropped, host.counts["dropped_queue_full"]) == (10, 10)
    host.now += REPORT_EVERY_S
    host.send(1)

    first, second = records_of(caplog, EVENT_DROPPED)
    assert (first["code"], first["policy"], first["keys"]) == ("queue_full", "drop_oldest", ("a/**",))
    assert first["reason"] == "a subscription's queue is full"
    assert [first["dropped_total"], second["dropped_total"]] == [2, 11]
    await subscription.aclose()


async def test_a_notified_subscriber_is_recorded_with_what_it_missed(caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost(FakeLog())
    subscription = host.subscribe("a/**", queue_events=2, overflow="drop_newest")
    host.store(5)
    reader = Reader(subscription)
    await reader.read_all()

    (record,) = records_of(caplog, EVENT_SUBSCRIBER_SLOW)
    assert (record["code"], record["keys"]) == ("lagged", ("a/**",))
    assert (record["missed"], record["after"], record["until"]) == (3, 2, 5)
    assert record["reason"]
    await subscription.aclose()


async def test_a_full_queue_that_spills_is_counted_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "zbus")
    host = FakeHost(FakeLog())
    subscription = host.subscribe(queue_events=2, overflow="spill")
    host.store(2)
    assert host.counts["spilled"] == 0
    host.store(1)

    (record,) = records_of(caplog, EVENT_SUBSCRIBER_SLOW)
    assert (record["code"], record["queue_events"]) == ("spilled", 2)
    assert host.counts["spilled"] == 1
    assert host.dispatcher.deliveries == 2  # the third is counted when it is read from the log
    reader = Reader(subscription)
    await reader.read_all()
    assert (len(reader.seen), host.dispatcher.deliveries) == (3, 3)
    await subscription.aclose()


async def test_a_burst_that_just_fills_the_queue_drops_nothing_and_spills_nothing() -> None:
    for name in POLICIES:
        host = FakeHost(FakeLog())
        subscription = host.subscribe(queue_events=3, overflow=name)
        host.store(3)

        assert (subscription.queued, subscription.dropped, subscription.is_live) == (3, 0, True)
        assert waits(host) == (name == "block")
        await subscription.aclose()


async def test_two_gaps_with_an_event_between_them_are_reported_apart() -> None:
    host = FakeHost(FakeLog())
    subscription = host.subscribe(queue_events=2, overflow="drop_newest")
    reader = Reader(subscription)
    host.store(3)  # the third is dropped
    await reader.read(1)
    host.store(2)  # the fourth is queued, the fifth dropped
    host.store(1)  # and the sixth: one gap
    await reader.read_all()

    assert [(lag.missed, lag.after, lag.until) for lag in reader.lags] == [(1, 2, 3), (2, 4, 6)]
    assert [sequence for _, sequence in reader.seen] == [0, 1, 3]
    await subscription.aclose()


async def test_bursts_that_drop_the_oldest_are_one_gap_until_it_was_reported() -> None:
    host = FakeHost(FakeLog(10))
    subscription = host.subscribe(queue_events=2)
    reader = Reader(subscription)
    host.store(1)
    await reader.read(1)
    host.store(3)
    host.store(2)
    await reader.read_all()

    assert [(lag.missed, lag.after, lag.until) for lag in reader.lags] == [(3, 10, 40)]
    assert [sequence for _, sequence in reader.seen] == [0, 4, 5]
    await subscription.aclose()


async def test_a_gap_of_events_in_the_log_and_others_says_how_far_the_log_has_them() -> None:
    for name in ("drop_oldest", "drop_newest"):
        host = FakeHost(FakeLog(10))
        subscription = host.subscribe(queue_events=1, overflow=name)
        host.store(2)
        host.receive(2)
        host.receive(1)
        reader = Reader(subscription)
        await reader.read_all()

        (lag,) = reader.lags
        assert (lag.missed, lag.until) == (4, 20)
        await subscription.aclose()


# Block.


async def test_publishers_wait_from_a_full_queue_until_half_of_it_was_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zbus")
    host = FakeHost()
    subscription = host.subscribe("a/**", queue_events=4, overflow="block")
    reader = Reader(subscription)

    host.send(3)
    assert not waits(host)
    host.send(1)
    assert waits(host)
    assert not waits(host, "other/x")
    await reader.read(1)
    assert waits(host)
    await reader.read(1)
    assert not waits(host)

    (record,) = records_of(caplog, EVENT_BACKPRESSURE)
    assert (record["code"], record["reason"]) == ("queue_full", "a subscription's queue is full")
    await subscription.aclose()


@pytest.mark.usefixtures("small_backlog")
async def test_what_a_local_publisher_has_in_flight_waits_in_the_backlog_whatever_its_size() -> None:
    host = FakeHost()
    subscription = host.subscribe(queue_events=4, overflow="block")
    host.send(100)

    assert (subscription._buffer.events, subscription.queued) == (4, 100)
    assert host.counts["backlogged"] == 96
    reader = Reader(subscription)
    await reader.read(97)
    assert waits(host)
    await reader.read(1)
    assert not waits(host)
    await reader.read_all()
    assert [sequence for _, sequence in reader.seen] == list(range(100))
    assert subscription.dropped == 0
    await subscription.aclose()


@pytest.mark.usefixtures("small_backlog")
async def test_received_events_beyond_the_backlog_are_dropped_where_they_are_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = FakeHost()
    subscription = host.subscribe(queue_events=4, overflow="block")
    host.receive(20)

    assert (subscription.queued, subscription.dropped) == (14, 6)
    assert (host.counts["dropped_backlog_full"], host.counts["backlogged"]) == (6, 10)
    (record,) = records_of(caplog, EVENT_DROPPED)
    assert (record["code"], record["policy"]) == ("backlog_full", "block")

    reader = Reader(subscription)
    await reader.read(4)  # now the backlog has capacity again
    host.receive(2)
    await reader.read_all()
    assert [sequence for _, sequence in reader.seen] == [*range(14), 20, 21]
    assert reader.missed == 6
    assert reader.lags[0].until == 0
    await subscription.aclose()


@pytest.mark.usefixtures("small_backlog")
async def test_stored_events_beyond_the_backlog_are_read_from_the_log_while_publishers_still_wait() -> None:
    host = FakeHost(FakeLog())
    subscription = host.subscribe(queue_events=4, overflow="block")
    reader = Reader(subscription)
    host.store(20)

    assert (subscription.queued, subscription.is_live) == (14, False)
    assert host.counts["spilled"] == 1
    await reader.read(19)
    assert waits(host)
    await reader.read_all()
    assert [sequence for _, sequence in reader.seen] == list(range(20))
    assert subscription.is_live
    assert not waits(host)
    host.store(1)
    await reader.read(1)
    assert reader.seen[-1] == (1, 20)
    await subscription.aclose()


@pytest.mark.usefixtures("small_backlog")
async def test_a_blocking_subscription_catches_up_although_other_keys_are_busy() -> None:
    host = FakeHost(FakeLog())
    subscription = host.subscribe("a/**", queue_events=4, overflow="block")
    host.store(20)
    host.store(50, "busy/x")
    reader = Reader(subscription)
    await reader.read(20)
    host.store(50, "busy/x")
    await reader.read_all()

    assert subscription.is_live
    assert not waits(host)
    await subscription.aclose()


async def test_closing_a_blocking_subscription_frees_publishers_and_its_backlog_can_be_read() -> None:
    host = FakeHost()
    subscription = host.subscribe(queue_events=2, overflow="block")
    host.receive(5)
    assert waits(host)
    await subscription.aclose()
    assert not host.backpressure.blocked
    reader = Reader(subscription)
    await reader.read_all()

    assert len(reader.seen) == 5


async def test_an_event_larger_than_the_backlog_is_kept_if_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "BACKLOG_BYTES_MAX", 1000)
    host = FakeHost()
    subscription = host.subscribe(queue_events=1, overflow="block")
    host.receive(1)
    host.receive(1, payload=b"x" * 5000)
    assert (subscription.queued, subscription.dropped) == (2, 0)
    host.receive(1, payload=b"x")
    assert (subscription.queued, subscription.dropped) == (2, 1)
    await subscription.aclose()


# Events that no log has, while a subscription reads the log.


async def test_events_that_no_log_has_wait_until_the_log_was_read() -> None:
    host = FakeHost(FakeLog())
    host.store(6)
    subscription = host.subscribe(queue_events=10, start="beginning")
    host.receive(3)
    reader = Reader(subscription)
    await reader.read_all()

    assert reader.seen == [*[(1, n) for n in range(6)], *[(3, n) for n in range(3)]]
    assert host.counts["backlogged"] == 3
    await subscription.aclose()


@pytest.mark.usefixtures("small_backlog")
async def test_more_events_that_no_log_has_than_the_backlog_holds_are_reported() -> None:
    host = FakeHost(FakeLog())
    subscription = host.subscribe(queue_events=100, start="beginning")
    host.receive(15)
    reader = Reader(subscription)
    await reader.read_all()

    assert (len(reader.seen), reader.missed, host.counts["dropped_backlog_full"]) == (10, 5, 5)
    await subscription.aclose()


# The table, and how to add a policy.


def test_the_table_has_the_names_that_users_may_write() -> None:
    assert tuple(POLICIES) == get_args(Overflow)
    assert [name for name, policy in POLICIES.items() if policy.drops] == ["drop_oldest", "drop_newest"]
    assert [name for name, policy in POLICIES.items() if policy.needs_log] == ["spill"]


async def test_a_policy_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class WholeBursts(Policy):
        """Queue a burst whole or not at all."""

        name = "whole_bursts"  # type: ignore[assignment]

        def overflow(self, events: Sequence[zbus.Event], received: bool) -> int:
            if len(events) > self._queue.free:
                self.drop(events, ("burst", "the queue has no capacity for the whole burst"))
                return len(events)
            return self._queue.fill(events)

    monkeypatch.setitem(POLICIES, "whole_bursts", WholeBursts)  # type: ignore[misc]
    async with zbus.open() as bus:
        async with bus.subscribe(KEY, queue_events=4, overflow="whole_bursts") as subscription:  # type: ignore[arg-type]
            publisher = await bus.publisher(KEY)
            for events in (3, 2, 1):
                await publisher.publish_many([b""] * events)
            reader = Reader(subscription)
            await reader.read_all()

            assert [sequence for _, sequence in reader.seen] == [0, 1, 2, 5]
            assert [lag.missed for lag in reader.lags] == [2]
            assert bus.stats()["dropped_burst"] == 2
