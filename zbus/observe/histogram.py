"""Histogram of durations with fixed bounds. It counts per burst, and its size is constant."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

# In microseconds: 1, 2, 5 in each decade from 20 us to 10 s. A last bucket counts longer durations.
BOUNDS_US: tuple[int, ...] = tuple(step * 10**power for power in range(1, 8) for step in (1, 2, 5))[1:-2]


class Histogram:
    """Counts of durations up to each bound. One thread writes; any thread may read.

    >>> taken = Histogram()
    >>> taken.add(30_000); taken.add_ages(1_000_000, [0, 900_000])
    >>> taken.count, taken.snapshot()["p50_us"]
    (3, 75.0)
    """

    __slots__ = ("buckets", "sum_ns")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_US) + 1)
        self.sum_ns = 0

    @property
    def count(self) -> int:
        """The number of counted durations."""
        return sum(self.buckets)

    def add(self, duration_ns: int, number: int = 1) -> None:
        """Count one duration `number` times."""
        duration_ns = max(0, duration_ns)
        self.buckets[bisect_left(_BOUNDS_NS, duration_ns)] += number
        self.sum_ns += duration_ns * number

    def add_ages(self, now_ns: int, since_ns: Sequence[int]) -> None:
        """Count the age of each of these times. The ages of a burst fall into few buckets, so each bound is searched
        among the times instead of each time among the bounds.
        """
        times = sorted(since_ns)
        self.sum_ns += max(0, now_ns * len(times) - sum(times))
        if times[-1] > now_ns:
            times = [min(each, now_ns) for each in times]  # the clock of the publisher is ahead of ours
        newest = bisect_left(_BOUNDS_NS, now_ns - times[-1])
        end = len(times)
        for at in range(newest, len(_BOUNDS_NS)):
            begin = bisect_left(times, now_ns - _BOUNDS_NS[at], 0, end)
            self.buckets[at] += end - begin
            end = begin
            if not end:
                return
        self.buckets[-1] += end

    def quantile_us(self, share: float) -> float:
        """Return the duration that `share` of all durations do not exceed, interpolated within its bucket."""
        rank, below = share * self.count, 0.0
        if not rank:
            return 0.0
        for (low, high), number in zip(pairwise((0, *BOUNDS_US)), self.buckets, strict=False):
            if below + number >= rank:
                return low + (high - low) * (rank - below) / number
            below += number
        return float(BOUNDS_US[-1])

    def snapshot(self) -> dict[str, Any]:
        """Return the count, the sum, two quantiles, and the buckets: one per bound in `BOUNDS_US`, and one above."""
        return {
            "count": self.count,
            "sum_us": self.sum_ns // 1000,
            "p50_us": round(self.quantile_us(0.5), 1),
            "p99_us": round(self.quantile_us(0.99), 1),
            "buckets": list(self.buckets),
        }


_BOUNDS_NS = tuple(bound * 1000 for bound in BOUNDS_US)
