"""Which events were seen: by identity, in bounded memory."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus.mesh import dedup as module
from zbus.mesh.dedup import Arrival, Dedup

NEW, DUPLICATE, LATE = Arrival.NEW, Arrival.DUPLICATE, Arrival.LATE


def arrivals(seen: Dedup, publisher_id: int, *sequences: int) -> list[Arrival]:
    return [seen.arrival(publisher_id, sequence) for sequence in sequences]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=200))
def test_each_identity_is_new_once_in_whatever_order_they_come(identities: list[tuple[int, int]]) -> None:
    seen = Dedup()
    reported: set[tuple[int, int]] = set()
    for identity in identities:
        expected = DUPLICATE if identity in reported else NEW

        assert (seen.look_up(*identity) is DUPLICATE) is (expected is DUPLICATE)
        assert seen.arrival(*identity) is expected

        reported.add(identity)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=200))
def test_within_any_bounds_nothing_is_new_twice_or_a_duplicate_that_was_not_seen(
    identities: list[tuple[int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "RANGES_MAX", 3)
        patched.setattr(module, "RANGES_TOTAL_MAX", 5)
        seen = Dedup()
        reported: set[tuple[int, int]] = set()
        for identity in identities:
            arrival = seen.arrival(*identity)

            assert arrival is not NEW or identity not in reported
            assert arrival is not DUPLICATE or identity in reported
            assert seen._ranges == sum(len(each.skipped) for each in seen._publishers.values()) <= 5
            reported.add(identity)


def test_a_first_event_with_a_high_sequence_does_not_hide_the_events_before_it() -> None:
    assert arrivals(Dedup(), 1, 1 << 60, 0, 1, 2, 1, 1 << 60) == [NEW, NEW, NEW, NEW, DUPLICATE, DUPLICATE]


def test_events_before_the_first_one_received_are_late_if_their_publisher_may_have_been_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PUBLISHERS_MAX", 1)
    seen = Dedup()
    arrivals(seen, 1, 4, 5)
    arrivals(seen, 2, 0)  # publisher 1 is forgotten

    assert arrivals(seen, 1, 6, 5, 4, 7) == [NEW, LATE, LATE, NEW]
    assert [seen.look_up(1, sequence).name for sequence in (5, 6)] == ["LATE", "DUPLICATE"]


def test_a_range_that_is_one_too_many_is_late_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANGES_MAX", 1)
    seen = Dedup()

    assert arrivals(seen, 1, 8, 10, 4, 5, 9, 4, 8) == [NEW, NEW, NEW, LATE, NEW, LATE, DUPLICATE]


def test_whatever_a_leap_skipped_is_still_new() -> None:
    assert arrivals(Dedup(), 1, 0, 1 << 60, 1, (1 << 60) - 1, 1 << 30) == [NEW] * 5


def test_leaps_of_one_publisher_cost_little_and_do_not_make_others_forget() -> None:
    seen = Dedup()
    arrivals(seen, 5, 0, 2)  # the event in between is late
    begun = time.process_time()

    for number in range(20_000):
        assert seen.arrival(9, number * 5_000) is NEW

    assert time.process_time() - begun < 2.0
    assert seen.arrival(5, 1) is NEW
    assert seen._ranges <= module.RANGES_MAX


def test_of_too_many_skipped_ranges_the_lowest_are_forgotten_and_what_was_in_them_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RANGES_MAX", 2)
    seen = Dedup()
    arrivals(seen, 1, 0, 2, 4, 6)  # 1, 3 and 5 were skipped

    assert arrivals(seen, 1, 1, 0, 3, 5, 4) == [LATE, LATE, NEW, NEW, DUPLICATE]


def test_of_too_many_ranges_over_all_those_of_the_least_recently_used_publisher_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RANGES_TOTAL_MAX", 2)
    seen = Dedup()
    for publisher in (1, 2, 3):
        arrivals(seen, publisher, 0, 2)

    assert [seen.arrival(publisher, 1) for publisher in (1, 2, 3)] == [LATE, NEW, NEW]
    assert arrivals(seen, 1, 2, 3) == [DUPLICATE, NEW]


def test_the_least_recently_used_publisher_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUBLISHERS_MAX", 2)
    evicted: list[None] = []
    seen = Dedup(lambda: evicted.append(None))
    for publisher in (1, 2, 1, 3):
        seen.arrival(publisher, 0)

    assert [seen.last(publisher) for publisher in (1, 2, 3)] == [0, None, 0]
    assert len(evicted) == 1


def test_a_forgotten_identity_is_new_once_more() -> None:
    seen = Dedup()
    assert arrivals(seen, 7, 0, 1, 3, 0) == [NEW, NEW, NEW, DUPLICATE]
    for sequence in (0, 2, 3, 4):  # 2 was not received, and 4 is not known yet
        seen.forget(7, sequence)
    seen.forget(7, 0)
    seen.forget(8, 0)

    assert arrivals(seen, 7, 0, 0, 1, 2, 3, 3, 4) == [NEW, DUPLICATE, DUPLICATE, NEW, NEW, DUPLICATE, NEW]
    assert seen._ranges == 0


def test_the_skipped_sequences_before_one_are_known_although_later_ones_came() -> None:
    seen = Dedup()
    arrivals(seen, 7, 0, 3, 4, 9)

    assert [seen.skipped_before(7, sequence) for sequence in (1, 2, 3, 4, 5, 7, 9, 10)] == [
        *(None, 1, 1, None, None, 5, 5, None)
    ]
    assert seen.skipped_before(8, 3) is None
