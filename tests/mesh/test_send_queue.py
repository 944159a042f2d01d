"""The send queue, step by step: order, accounting, recovery from the log, beacons, congestion, closing."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_fakes import Counts, FakeFabric, FakeLog, FakeRuntime, recorded, rows

from zbus.errors import LogError
from zbus.event import Provenance
from zbus.mesh import send_queue as module
from zbus.mesh.send_queue import (
    ANNOUNCEMENTS_MAX,
    BEACON_S,
    CONGESTED_EVENTS,
    GRACE_S,
    PAGE_EVENTS,
    POLL_S,
    QUIET_S,
    SendQueue,
)
from zbus.ports.log import Row
from zbus.util.runtime import REAL
from zbus.wire.beacon import ENTRIES_MAX, beacon_key
from zbus.wire.envelope import NODE
from zbus.wire.provenance import Forward

ORIGIN = 3
PAGE = 20  # events, with the fixture `small`
HELLO = ("@zbus/node/3", bytes([NODE]) + b"hello")


class Bench:
    """A send queue with a fake fabric, and a fake log or none, under virtual time."""

    def __init__(
        self,
        log: FakeLog | None = None,
        start: int = 0,
        fabric: FakeFabric | None = None,
        forward: Forward | None = None,
        runtime: FakeRuntime | None = None,
    ) -> None:
        self.log, self.fabric, self.counts = log, fabric or FakeFabric(), Counts()
        self.runtime = runtime or FakeRuntime()
        self.capacity_calls = self.published = 0
        self.queue = SendQueue(
            self.fabric,
            ORIGIN,
            log,
            start,
            log.head() if log else 0,
            self.counts.add,
            self._on_capacity,
            forward,
            self.runtime,
        )
        (self.driver,) = self.runtime.drivers

    def _on_capacity(self) -> None:
        self.capacity_calls += 1

    def offer(self, events: int, key: str = "shop/orders") -> None:
        """Commit events and offer them as one batch, but do not run a step."""
        made = rows(range(self.published, self.published + events), key)
        first = self.published + 1
        self.published += events
        self.queue.offer(made, self.log.store(made) if self.log is not None else range(first, first + events))

    def send(self, *batches: int) -> None:
        """Offer batches, and run what is due."""
        for events in batches:
            self.offer(events)
        self.runtime.run_due()

    @property
    def all_sent_in_order(self) -> bool:
        return self.fabric.sequences == list(range(self.published))

    @property
    def accounted(self) -> int:
        dropped = self.counts["dropped_send_queue_full"] + self.counts["dropped_at_close"]
        return self.queue.sent_events + dropped + self.queue.waiting


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(params=[1, 10], ids=["dense", "sparse"])
def stored(request: pytest.FixtureRequest) -> FakeLog:
    """A log; in the second form its offsets have gaps, which nothing outside the log may count on."""
    return FakeLog(stride=request.param)


@pytest.fixture
def logged(stored: FakeLog) -> Bench:
    """With such a log, which is empty at first."""
    return Bench(stored)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG_EVENTS_MAX", 100)
    monkeypatch.setattr(module, "PAGE_EVENTS", PAGE)


@pytest.fixture
def written() -> Iterator[list[dict[str, Any]]]:
    with recorded() as found:
        yield found


# Sending.


def test_events_are_sent_in_order_each_with_its_place_in_the_chain(bench: Bench) -> None:
    bench.send(2, 1)
    bench.send(2)

    assert bench.all_sent_in_order
    found = [(each.origin, each.offset, each.previous) for each in bench.fabric.envelopes]
    assert found == [(ORIGIN, 1, 0), (ORIGIN, 2, 1), (ORIGIN, 3, 2), (ORIGIN, 4, 3), (ORIGIN, 5, 4)]
    assert (bench.queue.sent, bench.queue.sent_events, bench.queue.waiting) == (5, 5, 0)


def test_an_event_costs_one_step(bench: Bench) -> None:
    bench.send(1)
    before = bench.driver.steps

    bench.send(1)

    assert bench.driver.steps == before + 1
    assert bench.driver.due == bench.runtime.now + QUIET_S


def test_nothing_runs_while_there_is_nothing_to_do(bench: Bench) -> None:
    bench.runtime.advance(60)

    assert bench.driver.steps == 1
    assert bench.driver.due == math.inf
    assert not bench.queue.has_sent


def test_an_empty_batch_is_nothing(bench: Bench) -> None:
    bench.send(0, 1, 0)

    assert bench.fabric.sequences == [0]
    assert bench.queue.has_sent


def test_events_wait_on_the_page_and_not_on_the_batch(bench: Bench) -> None:
    bench.send(1)

    bench.send(PAGE_EVENTS // 2, PAGE_EVENTS // 2, 1, 3 * PAGE_EVENTS + 1)

    assert bench.all_sent_in_order
    sizes = [sum(frame[0] != beacon_key(ORIGIN) for frame in call) for call in bench.fabric.calls]
    assert max(sizes) <= PAGE_EVENTS
    assert bench.queue.sent_events == bench.published


# A fabric that fails.


def test_the_order_is_kept_after_a_failed_send_without_a_log(bench: Bench) -> None:
    bench.send(1)
    bench.fabric.disconnect()
    bench.send(2, 3)
    bench.send(1, 1)

    bench.runtime.advance(1)
    assert bench.queue.waiting == 7
    bench.fabric.connect()
    bench.runtime.advance(2)

    assert bench.all_sent_in_order
    assert (bench.queue.waiting, bench.accounted) == (0, 8)


@pytest.mark.usefixtures("small")
def test_the_order_is_kept_when_a_large_batch_is_split_and_fails(bench: Bench) -> None:
    bench.fabric.disconnect()
    bench.send(50, 3, 30)
    bench.fabric.connect()

    bench.runtime.advance(2)

    assert bench.all_sent_in_order
    assert bench.accounted == 83


def test_a_failed_send_is_repeated_after_pauses_that_double(bench: Bench, written: list[dict[str, Any]]) -> None:
    bench.fabric.disconnect("no route")
    bench.send(1)
    bench.runtime.advance(6)

    pauses = [each["again_in_s"] for each in written]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert written[0] == {
        "level": logging.WARNING,
        "record": "EVENT_RETRY",
        "code": "send_failed",
        "reason": "no route",
        "again_in_s": 0.05,
    }

    bench.fabric.connect()
    bench.runtime.advance(2)
    bench.fabric.disconnect()
    bench.send(1)

    assert written[-1]["again_in_s"] == 0.05  # the pauses start again after a success


def test_events_that_are_offered_meanwhile_do_not_shorten_a_pause(bench: Bench) -> None:
    bench.fabric.disconnect()
    bench.send(1)
    bench.runtime.advance(1)
    before, due = len(bench.fabric.calls), bench.driver.due

    for _ in range(5):
        bench.send(1)

    assert len(bench.fabric.calls) == before
    assert bench.driver.due == due


def test_pauses_are_jittered() -> None:
    runtime = FakeRuntime()
    runtime.uniform = lambda low, high: low
    bench = Bench(runtime=runtime)
    bench.fabric.disconnect()

    bench.send(1)

    assert bench.driver.due == pytest.approx(runtime.now + 0.025)


def test_an_unexpected_error_does_not_end_the_queue(bench: Bench, written: list[dict[str, Any]]) -> None:
    bench.fabric.error = RuntimeError("a bug in an adapter")
    bench.send(1)
    bench.fabric.connect()
    bench.runtime.advance(1)

    assert bench.all_sent_in_order
    assert [each["error"] for each in written] == ["RuntimeError: a bug in an adapter"]


# Accounting: offered = sent + dropped + waiting.


@pytest.mark.usefixtures("small")
def test_a_batch_in_flight_is_not_counted_as_dropped(bench: Bench, written: list[dict[str, Any]]) -> None:
    def overflow() -> None:
        bench.fabric.during_send = lambda: None
        for _ in range(10):
            bench.offer(10)
        assert bench.queue.waiting == 30
        assert bench.accounted == bench.published

    bench.fabric.during_send = overflow
    bench.fabric.disconnect()
    bench.send(20)
    bench.fabric.connect()
    bench.runtime.advance(2)

    assert bench.fabric.sequences == [*range(20), *range(100, 120)]
    assert bench.counts == {"dropped_send_queue_full": 80}
    assert bench.accounted == bench.published == 120
    dropped = [each for each in written if each["record"] == "EVENT_DROPPED"]
    assert dropped == [
        {
            "level": logging.WARNING,
            "record": "EVENT_DROPPED",
            "code": "send_queue_full",
            "reason": "the transport is too slow or disconnected, and the node has no log",
            "events": 80,
        }
    ]


actions = st.one_of(
    st.tuples(st.just("offer"), st.integers(0, 130)),
    st.tuples(st.just("in flight"), st.integers(0, 130)),
    st.tuples(st.just("advance"), st.sampled_from([0.0, 0.05, 0.3, 2.0])),
    st.tuples(st.sampled_from(["disconnect", "connect"]), st.just(0)),
)


@pytest.mark.usefixtures("small")
@given(st.lists(actions, max_size=30))
def test_every_event_offered_is_sent_dropped_or_waiting(actions: Sequence[tuple[str, float]]) -> None:
    bench = Bench()
    in_flight: list[int] = []

    def check() -> None:
        assert bench.accounted == bench.published

    def during_send() -> None:
        check()
        while in_flight:
            bench.offer(in_flight.pop())
            check()

    bench.fabric.during_send = during_send
    for action, number in actions:
        if action == "offer":
            bench.offer(int(number))
        elif action == "in flight":
            in_flight.append(int(number))
        elif action == "advance":
            bench.runtime.advance(number)
        else:
            getattr(bench.fabric, action)()
        check()
    bench.fabric.connect()
    bench.runtime.advance(5)

    assert bench.queue.waiting == 0
    assert bench.fabric.sequences == sorted(set(bench.fabric.sequences))
    assert len(bench.fabric.sequences) + bench.counts["dropped_send_queue_full"] == bench.published


# With a log.


def test_the_queue_starts_with_the_events_that_the_log_has_after_its_position() -> None:
    log = FakeLog(stride=10)
    offsets = log.store(rows(range(5)))

    bench = Bench(log, start=offsets[1])
    bench.runtime.run_due()

    assert bench.fabric.sequences == [2, 3, 4]
    assert [each.previous for each in bench.fabric.envelopes] == offsets[1:4]
    assert bench.queue.sent == offsets[4]


def test_a_node_with_a_log_does_not_wait_for_a_subscriber(logged: Bench) -> None:
    logged.fabric.subscribed = False

    logged.send(1)

    assert logged.all_sent_in_order
    assert logged.fabric.ready_keys == []


def test_after_a_failure_the_queue_continues_from_the_log(logged: Bench) -> None:
    logged.send(2)
    logged.fabric.disconnect()
    logged.send(2)
    logged.send(3, 1)
    reached = logged.queue.sent
    logged.log.reads.clear()  # type: ignore[union-attr]
    assert logged.queue.waiting == 4  # those in flight are in the log

    logged.fabric.connect()
    logged.runtime.advance(1)
    logged.send(1)

    assert logged.log is not None
    assert logged.all_sent_in_order
    assert logged.log.reads[0] == reached == logged.fabric.offsets[1]
    assert (logged.queue.sent, logged.queue.waiting) == (logged.log.head(), 0)
    assert logged.counts == {}


@pytest.mark.usefixtures("small")
def test_the_backlog_takes_over_where_it_continues(logged: Bench) -> None:
    assert logged.log is not None
    logged.send(1)
    logged.fabric.disconnect()
    logged.send(20, 20, 20)
    logged.log.reads.clear()

    logged.fabric.connect()
    logged.runtime.advance(1)

    assert logged.all_sent_in_order
    assert logged.log.reads == [logged.fabric.offsets[0]]  # the batch that failed; the others were in memory


@pytest.mark.usefixtures("small")
def test_an_overflow_with_a_log_loses_nothing(logged: Bench, written: list[dict[str, Any]]) -> None:
    logged.send(1)
    logged.fabric.disconnect()
    logged.send(*[30] * 10)
    assert logged.queue.waiting <= 100
    logged.fabric.connect()

    logged.runtime.advance(2)

    assert logged.all_sent_in_order
    assert logged.counts == {}
    assert [each["record"] for each in written] == ["EVENT_RETRY"]


@pytest.mark.usefixtures("small")
def test_an_overflow_after_a_batch_that_ends_one_event_after_a_page_loses_nothing(logged: Bench) -> None:
    logged.offer(PAGE + 1)
    logged.offer(100 - PAGE)  # does not fit: the batches before it are read from the log

    logged.runtime.advance(1)

    assert logged.all_sent_in_order


@pytest.mark.usefixtures("small")
def test_an_overflow_while_the_end_of_the_log_is_read_loses_nothing(stored: FakeLog) -> None:
    stored.store(rows(range(10)))
    logged = Bench(stored)
    logged.published = 10

    def overflow() -> None:
        stored.during_read = lambda: None
        for _ in range(5):
            logged.offer(30)

    stored.during_read = overflow
    logged.runtime.advance(1)

    assert logged.all_sent_in_order
    assert logged.published == 160


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("behind", ["at the start", "after an overflow", "after a failed send"])
def test_reads_that_do_not_show_yet_what_is_stored_lose_nothing(stored: FakeLog, behind: str) -> None:
    """The backlog is empty then, and the log says that there is nothing more."""
    if behind == "at the start":
        stored.store(rows(range(10)))
    logged = Bench(stored)
    logged.published = 10 if behind == "at the start" else 0
    stored.hidden = 10
    if behind == "after an overflow":
        logged.offer(10)
        logged.offer(95)
        stored.hidden = 105
    elif behind == "after a failed send":
        logged.fabric.disconnect()
        logged.send(10)
        logged.fabric.connect()
    logged.runtime.advance(1)
    before = logged.driver.steps
    logged.runtime.advance(1)
    assert logged.fabric.sequences == []
    assert logged.driver.steps - before < 250  # it looks now and then, not all the time

    logged.send(5)
    stored.hidden = 0
    logged.runtime.advance(1)

    assert logged.all_sent_in_order
    assert [each.previous for each in logged.fabric.envelopes] == [0, *stored._offsets[:-1]]


def test_a_backlog_that_has_everything_is_sent_without_a_look_into_the_log(stored: FakeLog) -> None:
    stored.store(rows(range(3)))
    logged = Bench(stored, start=stored.head())
    logged.published = 3
    logged.send(2)
    logged.send(3)

    assert stored.reads == []
    assert logged.fabric.sequences == [3, 4, 5, 6, 7]


@pytest.mark.usefixtures("small")
def test_an_overflow_while_a_batch_is_sent_loses_nothing(logged: Bench) -> None:
    logged.send(1)

    def overflow() -> None:
        logged.fabric.during_send = lambda: None
        for _ in range(5):
            logged.offer(30)

    logged.fabric.during_send = overflow
    logged.send(10)
    logged.runtime.advance(1)

    assert logged.all_sent_in_order
    assert logged.published == 161


def test_a_log_that_lags_behind_its_own_commits_is_read_again_a_little_later() -> None:
    """A replicated log may do that; the queue must neither skip the events nor read without a pause."""
    bench = Bench(FakeLog())
    assert bench.log is not None
    bench.runtime.run_due()
    bench.fabric.disconnect()
    bench.send(1)
    bench.fabric.connect()
    bench.offer(1)
    events, bench.log._events = bench.log._events, []
    offsets, bench.log._offsets = bench.log._offsets, []
    bench.log.follows = lambda before, after: False  # type: ignore[method-assign]
    bench.runtime.advance(0.1)
    assert bench.fabric.sequences == []
    assert 5 < len(bench.log.reads) < 0.1 / POLL_S + 5

    bench.log._events, bench.log._offsets = events, offsets
    bench.runtime.advance(0.1)

    assert bench.all_sent_in_order


def test_an_error_of_the_log_is_retried(stored: FakeLog, written: list[dict[str, Any]]) -> None:
    stored.store(rows([0]))
    logged = Bench(stored)
    logged.published = 1
    stored.error = LogError("the disk is slow")
    logged.runtime.run_due()
    stored.error = None
    logged.send(2)
    logged.runtime.advance(1)

    assert logged.all_sent_in_order
    assert [(each["record"], each["reason"]) for each in written] == [("EVENT_RETRY", "the disk is slow")]


def test_events_that_retention_removed_are_counted_and_receivers_see_the_gap(
    logged: Bench, written: list[dict[str, Any]]
) -> None:
    assert logged.log is not None
    logged.send(1)
    logged.fabric.disconnect()
    logged.send(4)
    first, second, *_, low_water, last = logged.log._offsets
    logged.log.trim(low_water)
    logged.fabric.connect()
    logged.runtime.advance(0.2)

    assert logged.fabric.sequences == [0, 4]
    assert logged.fabric.envelopes[-1].previous == low_water > second
    assert logged.queue.sent == last
    assert logged.counts == {"dropped_by_retention": 3}
    assert [each for each in written if each["record"] == "EVENT_DROPPED"] == [
        {
            "level": logging.WARNING,
            "record": "EVENT_DROPPED",
            "code": "retention",
            "reason": "retention removed events before they were sent",
            "events": 3,
            "after": first,
            "until": low_water,
        }
    ]


def test_corrupt_events_are_skipped_and_counted_once(stored: FakeLog) -> None:
    offsets = stored.store(rows(range(4)))
    stored.corrupt(offsets[1])
    stored.corrupt(offsets[3])
    logged = Bench(stored)
    logged.fabric.disconnect()
    logged.runtime.advance(1)  # the page is read several times
    logged.fabric.connect()
    logged.runtime.advance(2)

    assert logged.fabric.sequences == [0, 2]
    assert logged.counts == {"corrupt_skipped": 2}
    assert logged.queue.sent == offsets[3]


@pytest.mark.usefixtures("small")
def test_a_page_of_corrupt_events_is_not_the_end_of_the_log() -> None:
    log = FakeLog()
    for offset in log.store(rows(range(45)))[:40]:
        log.corrupt(offset)
    bench = Bench(log)

    bench.runtime.run_due()

    assert bench.fabric.sequences == [40, 41, 42, 43, 44]
    assert bench.counts == {"corrupt_skipped": 40}


# Beacons.


def test_a_beacon_follows_the_last_event_of_a_burst(bench: Bench) -> None:
    bench.send(1)
    assert [each.head for each in bench.fabric.beacons] == [1]  # the first one at once

    bench.send(2)
    bench.runtime.advance(QUIET_S * 0.9)
    bench.send(1)
    bench.runtime.advance(QUIET_S * 0.9)
    assert len(bench.fabric.beacons) == 1
    bench.runtime.advance(QUIET_S * 0.2)

    beacon = bench.fabric.beacons[-1]
    assert (beacon.origin, beacon.since, beacon.head) == (ORIGIN, 1, 4)
    assert beacon.newest == {"shop/orders": (4, 7, 3)}


def test_beacons_are_sent_once_a_second_while_idle_and_while_busy(bench: Bench) -> None:
    bench.send(1)
    bench.runtime.advance(10 * BEACON_S + 0.5)
    idle = len(bench.fabric.beacons)
    for _ in range(500):
        bench.send(1)
        bench.runtime.advance(0.02)  # sooner than a burst can end

    assert idle == 11
    assert len(bench.fabric.beacons) == pytest.approx(idle + 10 * BEACON_S, abs=1)
    assert all(one.head == two.since for one, two in pairwise(bench.fabric.beacons))


def test_an_idle_beacon_repeats_the_position_and_names_no_event(bench: Bench) -> None:
    bench.send(1)
    bench.runtime.advance(BEACON_S)

    assert (bench.fabric.beacons[-1].head, bench.fabric.beacons[-1].newest) == (1, {})


def test_a_beacon_that_failed_is_sent_again_with_the_same_content(bench: Bench) -> None:
    bench.send(1)
    bench.send(1)
    bench.fabric.disconnect()
    bench.runtime.advance(QUIET_S)
    bench.fabric.connect()
    bench.runtime.advance(1)

    assert bench.fabric.beacons[1].newest == {"shop/orders": (2, 7, 1)}
    assert bench.fabric.beacons[1].since == 1
    assert bench.fabric.sequences == [0, 1]


@pytest.mark.parametrize("batch", [1, 3 * ENTRIES_MAX])
def test_no_beacon_names_more_keys_than_a_receiver_accepts(bench: Bench, batch: int) -> None:
    bench.send(1)
    made: list[Row] = [rows([number], key=f"shop/{number}")[0] for number in range(3 * ENTRIES_MAX)]
    for first in range(0, len(made), batch):
        bench.queue.offer(made[first : first + batch], range(first + 2, first + batch + 2))
    bench.runtime.advance(1)

    beacons = bench.fabric.beacons  # decoded, as a receiver does
    assert sum(len(each.newest) for each in beacons) == len(made) + 1
    assert all(one.head == two.since for one, two in pairwise(beacons))


def test_keys_do_not_add_up_while_beacons_fail(bench: Bench) -> None:
    bench.send(1)
    made: list[Row] = [rows([number], key=f"shop/{number}")[0] for number in range(3 * ENTRIES_MAX)]
    bench.queue.offer(made, range(2, len(made) + 2))
    failures = iter(range(5))

    def fail_beacons() -> None:
        bench.fabric.connect()
        if bench.fabric.calls[-1][0][0] == beacon_key(ORIGIN) and next(failures, None) is not None:
            bench.fabric.disconnect()

    bench.fabric.during_send = fail_beacons
    bench.runtime.advance(10)

    assert max(len(each.newest) for each in bench.fabric.beacons) <= ENTRIES_MAX
    assert bench.queue.sent_events == len(made) + 1


# Announcements.


def test_announcements_are_sent_once_and_after_the_events(bench: Bench) -> None:
    bench.send(1)
    bench.queue.announce([HELLO])
    bench.send(1)
    bench.runtime.advance(5)

    sent = [key for key, _ in bench.fabric.frames if key != beacon_key(ORIGIN)]
    assert sent == ["shop/orders", "shop/orders", HELLO[0]]


def test_announcements_do_not_wait_for_a_subscriber(bench: Bench) -> None:
    bench.fabric.subscribed = False
    bench.queue.announce([HELLO])
    bench.runtime.run_due()

    assert bench.fabric.frames == [HELLO]


def test_announcements_are_bounded_and_those_dropped_are_counted(bench: Bench) -> None:
    bench.fabric.subscribed = False
    bench.offer(1)
    bench.queue.announce([HELLO] * (ANNOUNCEMENTS_MAX - 1))
    bench.queue.announce([HELLO] * 2)
    bench.queue.announce([HELLO])
    assert bench.counts == {"dropped_announcements": 2}

    bench.fabric.subscribed = True
    bench.runtime.run_due()

    assert bench.fabric.frames.count(HELLO) == ANNOUNCEMENTS_MAX


@pytest.mark.parametrize("started", [False, True])
def test_announcements_that_cannot_be_sent_are_dropped_and_counted(
    bench: Bench, written: list[dict[str, Any]], started: bool
) -> None:
    if started:
        bench.send(1)
    bench.fabric.disconnect()
    bench.queue.announce([HELLO, HELLO])
    bench.runtime.run_due()
    bench.fabric.connect()
    bench.runtime.advance(5)

    assert HELLO not in bench.fabric.frames
    assert bench.counts == {"dropped_announcements": 2}
    assert len(written) == started  # before the first event, a node that is not connected yet is not worth a warning


@pytest.mark.parametrize("log", [None, FakeLog()], ids=["no log", "log"])
def test_a_fabric_that_carries_only_events_gets_nothing_else(log: FakeLog | None) -> None:
    bench = Bench(log, fabric=FakeFabric(events_only=True))
    bench.queue.announce([HELLO])
    bench.send(2)
    bench.queue.announce([HELLO])
    bench.runtime.advance(5)
    bench.queue.close(1)

    assert {key for key, _ in bench.fabric.frames} == {"shop/orders"}
    assert bench.all_sent_in_order
    assert bench.driver.due is None
    assert bench.counts == {}


# The first subscriber of a node without a log.


def test_the_first_events_wait_for_a_subscriber_and_are_sent_when_there_is_one(bench: Bench) -> None:
    bench.fabric.subscribed = False
    bench.send(2)
    bench.runtime.advance(GRACE_S / 2)
    assert bench.fabric.frames == []
    assert set(bench.fabric.ready_keys) == {"shop/orders"}

    bench.fabric.subscribed = True
    bench.runtime.advance(POLL_S)

    assert bench.all_sent_in_order
    asked = len(bench.fabric.ready_keys)
    bench.fabric.subscribed = False
    bench.send(1)
    assert bench.all_sent_in_order  # later ones do not wait
    assert len(bench.fabric.ready_keys) == asked


def test_the_first_events_wait_no_longer_than_the_grace_period(bench: Bench) -> None:
    bench.fabric.subscribed = False
    bench.runtime.advance(60)  # it begins with the first event
    bench.send(1)
    bench.runtime.advance(GRACE_S - POLL_S)
    assert bench.fabric.frames == []

    bench.runtime.advance(2 * POLL_S)

    assert bench.all_sent_in_order


def test_a_fabric_that_cannot_tell_whether_it_is_ready_does_not_end_the_queue(
    bench: Bench, written: list[dict[str, Any]]
) -> None:
    bench.fabric.disconnect("not yet")
    bench.fabric.ready_error = bench.fabric.error
    bench.send(1)
    bench.runtime.advance(0.3)
    bench.send(2)
    bench.fabric.connect()
    bench.fabric.ready_error = None
    bench.runtime.advance(0.5)

    assert bench.all_sent_in_order
    assert bench.fabric.calls[0][0][0] == "shop/orders"  # nothing was sent before it was ready
    assert {(each["record"], each["reason"]) for each in written} == {("EVENT_RETRY", "not yet")}


def test_the_grace_period_ends_even_if_the_fabric_never_tells_whether_it_is_ready(bench: Bench) -> None:
    bench.fabric.ready_error = RuntimeError("a bug in an adapter")
    bench.send(1)
    bench.runtime.advance(2 * GRACE_S)

    assert bench.all_sent_in_order


# Congestion.


def test_a_slow_fabric_congests_a_queue_without_a_log_until_half_of_it_is_sent(bench: Bench) -> None:
    bench.send(1)
    assert not bench.queue.congested
    bench.offer(CONGESTED_EVENTS)
    assert not bench.queue.congested
    bench.offer(1)
    assert bench.queue.congested

    calls: list[tuple[int, int]] = []
    bench.fabric.during_send = lambda: calls.append((bench.queue.waiting, bench.capacity_calls))
    bench.runtime.run_due()

    assert bench.capacity_calls == 1  # not with every page
    notified = [waiting for waiting, called in calls if called]
    assert CONGESTED_EVENTS // 2 - PAGE_EVENTS <= notified[0] < CONGESTED_EVENTS // 2
    assert not bench.queue.congested


def test_events_in_flight_count_as_waiting(bench: Bench) -> None:
    bench.send(1)
    congested: list[bool] = []
    bench.fabric.during_send = lambda: congested.append(bench.queue.congested)

    bench.send(CONGESTED_EVENTS + 1)

    assert congested[0]
    assert not congested[1]


def test_a_disconnected_fabric_lets_publishers_continue(bench: Bench) -> None:
    bench.send(1)
    bench.offer(CONGESTED_EVENTS + 1)
    assert bench.queue.congested
    bench.fabric.disconnect()

    bench.runtime.run_due()

    assert bench.capacity_calls == 1
    assert not bench.queue.congested
    bench.runtime.advance(1)
    assert bench.capacity_calls == 1


def test_free_capacity_is_not_notified_if_there_was_no_congestion(bench: Bench) -> None:
    bench.send(10)
    bench.fabric.disconnect()
    bench.send(10)

    assert bench.capacity_calls == 0


def test_a_queue_with_a_log_is_never_congested(logged: Bench) -> None:
    logged.send(1)
    logged.offer(CONGESTED_EVENTS + 1)

    assert not logged.queue.congested


# Forwarding for a bridge.


def foreign(sequence: int) -> Row:
    published_at = FakeRuntime().time_ns() - 5_000_000
    return Row(8, sequence, published_at, f"shop/{sequence}", b"x", None, Provenance(21, 4, (19,), "nats://far"))


def test_a_bridge_forwards_events_of_other_nodes_and_measures_their_age() -> None:
    def forward(key: str, came: Provenance) -> tuple[int, ...] | None:
        return None if key == "shop/1" else (*came.via, came.origin)

    bench = Bench(forward=forward)
    bench.queue.offer([foreign(0), foreign(1), foreign(2)], [1, 2, 3])
    bench.runtime.run_due()

    assert [(each.sequence, each.via) for each in bench.fabric.envelopes] == [(0, (19, 21)), (2, (19, 21))]
    assert (bench.queue.forwarded, bench.queue.forwarded_lag_ns) == (2, 5_000_000)
    assert (bench.queue.sent, bench.queue.waiting) == (3, 0)


def test_a_node_that_is_not_a_bridge_sends_only_its_own_events(bench: Bench) -> None:
    bench.queue.offer([foreign(0), *rows([1])], [1, 2])
    bench.runtime.run_due()

    assert bench.fabric.sequences == [1]
    assert bench.queue.forwarded == 0


# Closing.


def test_closing_sends_the_rest_and_one_last_beacon(bench: Bench) -> None:
    bench.send(1)
    bench.offer(PAGE_EVENTS)
    bench.offer(PAGE_EVENTS)
    before = bench.runtime.now

    bench.queue.close(1)

    assert bench.all_sent_in_order
    assert bench.fabric.beacons[-1].head == bench.published
    assert bench.fabric.beacons[-1].newest == {"shop/orders": (bench.published, 7, bench.published - 1)}
    assert bench.driver.due is None
    assert bench.runtime.now == before


@pytest.mark.parametrize("fails", [False, True], ids=["connected", "failing"])
def test_a_queue_that_ends_calls_back_after_its_last_step_and_does_not_block(bench: Bench, fails: bool) -> None:
    ended: list[int] = []
    bench.send(1)
    bench.offer(3)
    if fails:
        bench.fabric.disconnect()

    bench.queue.end(lambda: ended.append(len(bench.fabric.beacons)))
    assert ended == []
    bench.runtime.run_due()

    assert ended == [len(bench.fabric.beacons)]
    assert bench.driver.due is None
    assert bench.all_sent_in_order is not fails


def test_closing_soon_after_an_event_sends_its_beacon(bench: Bench) -> None:
    bench.send(1)
    bench.send(1)
    assert bench.fabric.beacons[-1].head == 1

    bench.queue.close(1)

    assert bench.fabric.beacons[-1].head == 2
    assert bench.driver.due is None


def test_closing_right_after_a_beacon_sends_no_second_one(bench: Bench) -> None:
    bench.send(1)
    beacons = len(bench.fabric.beacons)

    bench.queue.close(1)
    bench.queue.close(1)

    assert len(bench.fabric.beacons) == beacons
    assert bench.driver.due is None


def test_closing_does_not_wait_for_a_subscriber(bench: Bench) -> None:
    bench.fabric.subscribed = False
    bench.send(2)

    bench.queue.close(1)

    assert bench.all_sent_in_order
    assert bench.driver.due is None


def test_a_queue_can_be_congested_before_its_first_step(bench: Bench) -> None:
    assert not bench.queue.congested
    bench.offer(CONGESTED_EVENTS + 1)

    assert bench.queue.congested


def test_a_queue_that_ends_without_being_closed_counts_what_is_not_sent(bench: Bench) -> None:
    bench.fabric.disconnect()
    bench.offer(2)
    counted: list[int] = []

    bench.queue.end(lambda: counted.append(bench.counts["dropped_at_close"]))
    bench.runtime.run_due()

    assert counted == [2]


def test_closing_counts_what_a_blocked_fabric_did_not_take_and_does_not_send_it_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.offer(2)
    monkeypatch.setattr(bench.driver, "join", lambda timeout_s: False)  # the fabric blocks its thread

    bench.queue.close(5)
    assert bench.counts["dropped_at_close"] == 2
    bench.runtime.advance(5)

    assert (bench.fabric.sequences, bench.counts["dropped_at_close"]) == ([], 2)


@pytest.mark.parametrize("paused", [True, False])
def test_closing_ends_at_once_if_the_fabric_is_disconnected(bench: Bench, paused: bool) -> None:
    bench.send(1)
    bench.fabric.disconnect()
    bench.offer(1)
    if paused:
        bench.runtime.advance(3)
    calls, before = len(bench.fabric.calls), bench.runtime.now

    with recorded(logging.WARNING) as records:
        bench.queue.close(5)

    assert bench.driver.due is None
    assert bench.runtime.now == before
    assert len(bench.fabric.calls) == calls + (not paused)
    assert (bench.queue.waiting, bench.counts["dropped_at_close"], bench.accounted) == (0, 1, 2)
    lost = [(each["record"], each["code"], each["events"]) for each in records if each["record"] == "EVENT_DROPPED"]
    assert lost == [("EVENT_DROPPED", "closed_before_sent", 1)]


def test_closing_sends_the_events_that_only_the_log_has(logged: Bench) -> None:
    assert logged.log is not None
    logged.runtime.run_due()
    logged.fabric.disconnect()
    logged.send(5)
    logged.fabric.connect()
    logged.runtime.now += 0.05  # the pause is over, and no step was run since

    logged.queue.close(1)

    assert logged.all_sent_in_order
    assert logged.fabric.beacons[-1].head == logged.log.head()


# On a thread.


def test_a_thread_sends_events_that_other_threads_offer_until_it_is_closed() -> None:
    fabric, counts = FakeFabric(), Counts()
    queue = SendQueue(fabric, ORIGIN, None, 0, 0, counts.add, lambda: None, None, REAL)
    fabric.during_send = lambda: time.sleep(0.0005)
    positions = iter(range(1, 1_000_000))
    numbering = threading.Lock()

    def publish(publisher_id: int) -> None:
        for number in range(100):
            with numbering:  # as the loop does: positions rise
                queue.offer(rows([number], publisher_id=publisher_id), [next(positions)])

    publishers = [threading.Thread(target=publish, args=(number,)) for number in range(3)]
    for each in publishers:
        each.start()
    for each in publishers:
        each.join()
    queue.close(10)

    for publisher_id in range(3):
        assert [e.sequence for e in fabric.envelopes if e.publisher_id == publisher_id] == list(range(100))
    assert fabric.offsets == list(range(1, 301))
    assert (queue.waiting, queue.sent_events, counts) == (0, 300, {})
