"""Histograms count what they are given, in bursts or one by one, and tell quantiles from bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zbus.observe.histogram import BOUNDS_US, Histogram

NOW = 1_700_000_000_000_000_000
AGES = st.integers(min_value=-1_000_000, max_value=20_000_000_000)


@given(st.lists(AGES, min_size=1, max_size=50))
def test_a_burst_is_counted_like_its_durations_one_by_one(ages: list[int]) -> None:
    burst, single = Histogram(), Histogram()

    burst.add_ages(NOW, [NOW - age for age in ages])
    for age in ages:
        single.add(age)

    assert burst.buckets == single.buckets
    assert burst.count == len(ages)


@given(st.lists(st.integers(min_value=0, max_value=20_000_000_000), min_size=1, max_size=50))
def test_a_quantile_lies_in_the_bucket_of_the_duration_that_it_stands_for(durations: list[int]) -> None:
    found = Histogram()
    for duration in durations:
        found.add(duration)

    for share in (0.5, 0.99):
        rank = max(1, -(-len(durations) * round(share * 100) // 100))
        exact_us = sorted(durations)[rank - 1] / 1000
        above = [bound for bound in BOUNDS_US if bound >= exact_us]
        below = [bound for bound in BOUNDS_US if bound < exact_us]
        assert (below[-1] if below else 0) <= found.quantile_us(share) <= (above[0] if above else BOUNDS_US[-1])


def test_a_clock_that_is_ahead_counts_as_no_time_at_all() -> None:
    found = Histogram()
    found.add_ages(NOW, [NOW + 5_000_000, NOW - 30_000])

    assert found.buckets[:2] == [1, 1]
    assert found.sum_ns >= 0


def test_nothing_measured_has_no_quantile() -> None:
    found = Histogram().snapshot()
    assert (found["count"], found["sum_us"], found["p50_us"], found["p99_us"]) == (0, 0, 0.0, 0.0)
