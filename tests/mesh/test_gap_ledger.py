"""The gap ledger: gaps that cannot be repaired now are reported once, and open ones are counted until they close."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mesh_fakes import Counts, FakeRuntime, envelope

from zbus.mesh import gap_ledger as module
from zbus.mesh.gap_ledger import GapLedger, TrimmedRanges
from zbus.mesh.interest import Interest
from zbus.wire.beacon import Newest

ORIGIN = 5
QUIET_S = 0.25


class Reporter:
    """Keeps what is reported. `nothing_missing`: every event of these publishers came by another path."""

    def __init__(self) -> None:
        self.interest, self.counts = Interest(), Counts()
        self.interest.add(["shop/**"], 0, store=True)
        self.gaps: list[tuple[str, int, int, bool]] = []
        self.open: list[tuple[str, int, int, int]] = []
        self.nothing_missing: set[int] = set()

    def report_gap(self, origin: int, key: str, publisher_id: int, sequence: int, counted: bool = False) -> bool:
        assert origin == ORIGIN
        self.gaps.append((key, publisher_id, sequence, counted))
        return publisher_id not in self.nothing_missing

    def report_open_gap(self, origin: int, key: str, publisher_id: int, after: int, sequence: int) -> bool:
        assert origin == ORIGIN
        self.open.append((key, publisher_id, after, sequence))
        missing = publisher_id not in self.nothing_missing
        self.count("gaps_open", missing)
        return missing

    def count(self, name: str, events: int) -> None:
        self.counts.add(name, events)


@pytest.fixture
def reporter() -> Reporter:
    return Reporter()


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def ledger(reporter: Reporter, runtime: FakeRuntime) -> GapLedger:
    return GapLedger(ORIGIN, reporter, runtime)


def seen(**offsets: int) -> Callable[[str], int]:
    """Up to which offset the keys under `shop` came."""
    return lambda key: offsets.get(key.removeprefix("shop/"), 0)


# Lost ends: only beacons name them.


def test_an_event_that_a_beacon_named_may_be_in_flight_for_a_moment_and_is_then_missing(
    ledger: GapLedger, runtime: FakeRuntime
) -> None:
    newest: dict[str, Newest] = {"shop/a": (9, 7, 3)}
    ledger.note_newest(newest)
    assert ledger.missing_tails(seen(), QUIET_S) == (newest, {})

    runtime.advance(QUIET_S * 0.9)
    assert ledger.missing_tails(seen(a=8), QUIET_S) == (newest, {})
    runtime.advance(QUIET_S * 0.1)
    assert ledger.missing_tails(seen(a=8), QUIET_S) == ({}, newest)


def test_an_event_that_came_is_not_missing(ledger: GapLedger, runtime: FakeRuntime) -> None:
    ledger.note_newest({"shop/a": (9, 7, 3), "shop/b": (10, 7, 4)})
    runtime.advance(QUIET_S)

    assert ledger.missing_tails(seen(a=9, b=9), QUIET_S) == ({}, {"shop/b": (10, 7, 4)})


def test_a_key_that_no_subscriber_needs_is_not_missing(ledger: GapLedger, runtime: FakeRuntime) -> None:
    ledger.note_newest({"audit/a": (9, 7, 3)})
    runtime.advance(QUIET_S)

    assert ledger.missing_tails(seen(), QUIET_S) == ({}, {})


def test_a_later_beacon_replaces_what_an_earlier_one_named(ledger: GapLedger, runtime: FakeRuntime) -> None:
    ledger.note_newest({"shop/a": (9, 7, 3)})
    runtime.advance(QUIET_S)
    ledger.note_newest({"shop/a": (12, 7, 5)})

    assert ledger.missing_tails(seen(), QUIET_S) == ({"shop/a": (12, 7, 5)}, {})


def test_the_keys_that_beacons_named_are_bounded(
    ledger: GapLedger, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEYS_MAX", 2)
    ledger.note_newest({"shop/a": (1, 7, 1), "shop/b": (2, 7, 2), "shop/c": (3, 7, 3)})
    ledger.note_newest({"shop/b": (4, 7, 4)})  # known: its place is taken already
    runtime.advance(QUIET_S)

    _, missing = ledger.missing_tails(seen(), QUIET_S)
    assert missing == {"shop/a": (1, 7, 1), "shop/b": (4, 7, 4)}


# Open gaps.


def test_each_gap_between_buffered_events_is_reported_with_the_sequences_around_it(
    ledger: GapLedger, reporter: Reporter
) -> None:
    held = [
        envelope(4, previous=3, key="shop/a", sequence=14),  # 3 is missing
        envelope(5, previous=4, key="shop/a", sequence=15),
        envelope(9, previous=7, key="shop/a", sequence=19),  # 7 is missing
        envelope(10, previous=2, key="shop/b", publisher_id=8, sequence=20),  # 2 was seen
    ]

    ledger.report(held, {}, seen(a=1, b=2))

    assert reporter.open == [("shop/a", 7, -1, 14), ("shop/a", 7, 15, 19)]
    assert reporter.counts == {"gaps_open": 2}


def test_an_event_that_was_seen_meanwhile_is_not_reported(ledger: GapLedger, reporter: Reporter) -> None:
    ledger.report([envelope(4, previous=3, key="shop/a"), envelope(3, previous=2, key="shop/a")], {}, seen(a=4))

    assert reporter.open == []


def test_an_event_that_was_seen_meanwhile_does_not_bound_the_gap_after_it(
    ledger: GapLedger, reporter: Reporter
) -> None:
    held = [
        envelope(3, previous=2, key="shop/a", sequence=13),
        envelope(4, previous=3, key="shop/a", sequence=14),
        envelope(9, previous=7, key="shop/a", sequence=19),
    ]

    ledger.report(held, {}, seen(a=4))

    assert reporter.open == [("shop/a", 7, -1, 19)]  # the one that reports it knows what was seen


def test_the_first_event_of_a_log_may_be_missing(ledger: GapLedger, reporter: Reporter) -> None:
    ends: dict[str, Newest] = {"shop/b": (1, 8, 0)}

    ledger.report([envelope(2, previous=1, key="shop/a", sequence=2)], ends, seen())

    assert reporter.open == [("shop/a", 7, -1, 2), ("shop/b", 8, -1, 1)]


def test_the_first_event_of_a_log_bounds_the_gap_after_it(ledger: GapLedger, reporter: Reporter) -> None:
    held = [envelope(1, key="shop/a", sequence=4), envelope(3, previous=2, key="shop/a", sequence=6)]

    ledger.report(held, {}, seen())

    assert reporter.open == [("shop/a", 7, 4, 6)]


def test_buffered_events_that_follow_each_other_have_no_gap(ledger: GapLedger, reporter: Reporter) -> None:
    held = [envelope(4, previous=1, key="shop/a"), envelope(5, previous=4, key="shop/a")]

    ledger.report(held, {}, seen(a=1))

    assert reporter.open == []


def test_a_later_gap_is_reported_after_the_event_that_ended_the_one_before(
    ledger: GapLedger, reporter: Reporter
) -> None:
    ledger.report([envelope(4, previous=3, key="shop/a", sequence=14)], {}, seen(a=1))
    ledger.report([envelope(9, previous=7, key="shop/a", sequence=19)], {}, seen(a=4))

    assert reporter.open == [("shop/a", 7, -1, 14), ("shop/a", 7, 14, 19)]


def test_a_gap_is_reported_once(ledger: GapLedger, reporter: Reporter) -> None:
    held = [envelope(4, previous=3, key="shop/a", sequence=14)]
    ledger.report(held, {}, seen(a=1))
    ledger.report(held, {}, seen(a=1))
    assert len(reporter.open) == 1

    held.append(envelope(9, previous=7, key="shop/a", sequence=19))
    ledger.report(held, {}, seen(a=1))

    assert reporter.open[1:] == [("shop/a", 7, 14, 19)]
    assert reporter.counts == {"gaps_open": 2}


def test_a_lost_end_is_reported_up_to_and_including_the_event_that_the_beacon_named(
    ledger: GapLedger, reporter: Reporter
) -> None:
    ends: dict[str, Newest] = {"shop/a": (9, 7, 19), "shop/b": (8, 8, 30)}

    ledger.report([envelope(5, previous=1, key="shop/a", sequence=15)], ends, seen(a=1))
    ledger.report([], ends, seen(a=1))

    assert reporter.open == [("shop/a", 7, 15, 20), ("shop/b", 8, -1, 31)]


def test_an_end_that_is_buffered_is_not_lost(ledger: GapLedger, reporter: Reporter) -> None:
    ledger.report([envelope(9, previous=1, key="shop/a")], {"shop/a": (9, 7, 9)}, seen(a=1))

    assert reporter.open == []


def test_a_later_end_is_reported_after_the_one_before(ledger: GapLedger, reporter: Reporter) -> None:
    ledger.report([], {"shop/a": (9, 7, 19)}, seen())
    ledger.report([], {"shop/a": (12, 7, 22)}, seen())
    ledger.report([], {"shop/a": (15, 8, 40)}, seen())  # another publisher has its own sequences

    assert reporter.open == [("shop/a", 7, -1, 20), ("shop/a", 7, 19, 23), ("shop/a", 8, -1, 41)]


def test_open_gaps_are_no_longer_counted_once_they_are_closed(ledger: GapLedger, reporter: Reporter) -> None:
    reporter.nothing_missing.add(8)
    ledger.report([], {"shop/a": (9, 7, 19), "shop/b": (10, 8, 3), "shop/c": (11, 7, 20)}, seen())
    assert reporter.counts == {"gaps_open": 2}  # everything of publisher 8 came by another path

    ledger.close()
    assert reporter.counts["gaps_open"] == 0
    ledger.close()
    assert reporter.counts["gaps_open"] == 0


def test_a_closed_ledger_starts_again(ledger: GapLedger, reporter: Reporter, runtime: FakeRuntime) -> None:
    ledger.note_newest({"shop/a": (9, 7, 19)})
    ledger.report([], {"shop/a": (9, 7, 19)}, seen())
    ledger.close()
    runtime.advance(QUIET_S)
    assert ledger.missing_tails(seen(), QUIET_S) == ({}, {})

    ledger.report([], {"shop/a": (9, 7, 19)}, seen())

    assert len(reporter.open) == 2


# Retention at the publisher.


@pytest.fixture
def trimmed(reporter: Reporter, runtime: FakeRuntime) -> TrimmedRanges:
    return TrimmedRanges(ORIGIN, 10, reporter, runtime)


def test_a_trimmed_range_is_reported_before_the_first_event_of_each_publisher(
    trimmed: TrimmedRanges, reporter: Reporter
) -> None:
    assert trimmed.report([envelope(11, previous=10, key="shop/a"), envelope(12, previous=9, publisher_id=8)])
    assert not trimmed.report([envelope(13, previous=10, key="shop/b")])

    assert reporter.gaps == [("shop/a", 7, 11, False), ("shop/orders", 8, 12, False)]
    assert reporter.counts == {}  # the one who reports the gap counts it


def test_an_event_whose_predecessor_is_not_trimmed_says_nothing_about_the_range(
    trimmed: TrimmedRanges, reporter: Reporter
) -> None:
    assert not trimmed.report([envelope(12, previous=11)])
    assert reporter.gaps == []

    assert trimmed.report([envelope(13, previous=10, key="shop/b")])


def test_a_range_that_no_subscriber_needed_at_that_time_is_not_reported(
    trimmed: TrimmedRanges, reporter: Reporter, runtime: FakeRuntime
) -> None:
    reporter.interest.add(["new/**"], runtime.time_ns() + 1, store=False)
    reporter.interest.add(["old/**"], runtime.time_ns(), store=False)

    assert not trimmed.report([envelope(11, key="new/a")])
    assert not trimmed.report([envelope(12, key="unknown/a", publisher_id=8)])
    assert trimmed.report([envelope(13, key="old/a", publisher_id=9)])

    assert [gap[:2] for gap in reporter.gaps] == [("old/a", 9)]


def test_a_range_that_cannot_be_reported_yet_is_counted_once(trimmed: TrimmedRanges, reporter: Reporter) -> None:
    trimmed.report_range(0)
    assert reporter.counts == {"gaps": 1, "gaps_unrepaired": 1}
    reporter.nothing_missing.add(8)

    assert not trimmed.report([envelope(11, publisher_id=8)])
    assert trimmed.report([envelope(12), envelope(13, publisher_id=9)])

    # The first report that is one has been counted; the next one is another gap.
    assert [gap[1:] for gap in reporter.gaps] == [(8, 11, True), (7, 12, True), (9, 13, False)]


def test_the_publishers_of_a_trimmed_range_are_bounded(
    trimmed: TrimmedRanges, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUBLISHERS_MAX", 2)

    trimmed.report([envelope(11, publisher_id=publisher_id) for publisher_id in (1, 2, 3)])

    assert [publisher_id for _, publisher_id, _, _ in reporter.gaps] == [1, 2]
