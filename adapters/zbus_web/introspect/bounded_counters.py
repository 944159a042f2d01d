"""Counts by name in a table of fixed size, and the aggregation of bursts before they are added to it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import exp
from typing import Generic, TypeVar

from zbus.ports.log import Row

OVER_S = 3.0  # Rates are averages over about this time, with exponentially decreasing weights.


K = TypeVar("K")


class Count:
    """Events of one name, and their rate."""

    __slots__ = ("at", "bytes", "events", "last_ns", "rate", "sequence")

    def __init__(self) -> None:
        self.events = self.bytes = self.last_ns = self.sequence = 0
        self.rate = self.at = 0.0  # events per second, and the time of that rate

    def add(self, other: Count, now: float) -> None:
        """Add the events counted since the last call."""
        self.events += other.events
        self.bytes += other.bytes
        self.rate = self.rate * exp((self.at - now) / OVER_S) + other.rate
        self.sequence, self.last_ns, self.at = other.sequence, other.last_ns, now


class Table(Generic[K]):
    """Counts by name. A full table evicts the tenth that was idle longest, and adds it to `other`."""

    __slots__ = ("counts", "other", "others", "size")

    def __init__(self, size: int) -> None:
        self.size, self.counts = size, dict[K, Count]()
        self.other, self.others = Count(), 0  # evicted counts, and the number of evicted names

    def add(self, name: K, count: Count, now: float) -> None:
        """Add a count to a new or known name."""
        found = self.counts.get(name)
        if found is None:
            if len(self.counts) >= self.size:
                self._evict()
            found = self.counts[name] = Count()
        found.add(count, now)

    def _evict(self) -> None:
        number = max(1, self.size // 10)
        for name in heapq.nsmallest(number, self.counts, key=lambda name: self.counts[name].at):
            gone = self.counts.pop(name)
            self.other.events += gone.events
            self.other.bytes += gone.bytes
            self.other.last_ns = max(self.other.last_ns, gone.last_ns)
            self.others += 1


def gather(groups: dict[tuple[int, str], Count], rows: Sequence[Row], size: int, weight: float) -> None:
    """Add a burst by publisher and key. A large burst usually has one publisher and key, and is added at once."""
    last, number = rows[-1], len(rows)
    publisher_id, key = last.publisher_id, last.key
    if number > 1 and not all(row.publisher_id == publisher_id and row.key == key for row in rows):
        for row in rows:
            count = groups.get((row.publisher_id, row.key))
            if count is None:
                count = groups[row.publisher_id, row.key] = Count()
            count.events += 1
            count.bytes += len(row.payload)
            count.rate += weight
            count.sequence, count.last_ns = row.sequence, row.published_at
        return
    count = groups.get((publisher_id, key))
    if count is None:
        count = groups[publisher_id, key] = Count()
    count.events += number
    count.bytes += size
    count.rate += weight * number
    count.sequence, count.last_ns = last.sequence, last.published_at
