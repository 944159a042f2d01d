"""Which events were seen: by identity, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_fakes import FakeRuntime

from zbus.mesh import dedup as module
from zbus.mesh.dedup import Dedup
from zbus.util.runtime import Runtime


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=200))
def test_each_identity_is_new_once_in_whatever_order_they_come(identities: list[tuple[int, int]]) -> None:
    seen = Dedup(FakeRuntime())
    first_received: dict[int, int] = {}
    reported: set[tuple[int, int]] = set()
    for publisher, sequence in identities:
        first_received.setdefault(publisher, sequence)
        expected = (publisher, sequence) not in reported and sequence >= first_received[publisher]

        assert seen.first_time(publisher, sequence) is expected

        reported.add((publisher, sequence))


def test_what_came_before_the_first_one_received_counts_as_seen() -> None:
    seen = Dedup(FakeRuntime())

    assert seen.first_time(1, 5)
    assert not seen.first_time(1, 4)


def test_a_huge_leap_costs_bounded_memory() -> None:
    seen = Dedup(FakeRuntime())
    seen.first_time(1, 0)

    assert seen.first_time(1, 1 << 60)
    assert not seen.first_time(1, 1)  # too long ago to be distinguished from a repetition
    assert seen.first_time(1, (1 << 60) - 1)


def test_the_publisher_known_longest_is_forgotten_first() -> None:
    seen = Dedup(FakeRuntime())
    for publisher in range(module.PUBLISHERS_MAX + 1):
        seen.first_time(publisher, 0)

    assert seen.last(0) is None
    assert seen.last(1) == 0


def test_a_skipped_event_is_new_for_two_minutes_of_the_node_s_clock() -> None:
    now, runtime = [0.0], Runtime()
    runtime.monotonic = lambda: now[0]
    seen = Dedup(runtime)
    seen.first_time(1, 0)
    seen.first_time(1, 3)

    now[0] = module.WINDOW_S - 1
    assert seen.first_time(1, 1)
    now[0] = module.WINDOW_S + 1
    assert not seen.first_time(1, 2)


def test_of_too_many_skipped_events_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SKIPPED_MAX", 3)
    seen = Dedup(FakeRuntime())
    seen.first_time(1, 0)
    seen.first_time(1, 5)  # 1 to 4 were skipped

    assert [seen.first_time(1, sequence) for sequence in (1, 2, 3, 4)] == [False, True, True, True]


def test_a_forgotten_identity_is_new_once_more() -> None:
    seen = Dedup(FakeRuntime())
    assert [seen.first_time(7, 0), seen.first_time(7, 1), seen.first_time(7, 0)] == [True, True, False]
    seen.forget(7, 0)

    assert [seen.first_time(7, 0), seen.first_time(7, 0), seen.first_time(7, 1)] == [True, False, False]
