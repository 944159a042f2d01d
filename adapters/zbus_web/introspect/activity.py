"""Activity per key and publisher: always counted, many bursts at a time, in bounded memory.

A burst is only queued when it passes, and counted together with others when many are queued or a client reads the
counts. That costs less than a fiftieth of publishing, so it is always on, and the first client sees earlier activity
too. The keys that were idle longest are evicted for new ones; their counts are added to `other`, so that the sum over
all keys stays exact.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from math import exp
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from zbus.deliver.subscriber import PAGE_EVENTS
from zbus.introspection import of
from zbus.keys import KeySet
from zbus.ports.log import Row, Span, row_of

from .bounded_counters import OVER_S, Count, Table, gather
from .log_records import ProblemRecords

if TYPE_CHECKING:
    import zbus

KEYS_MAX = 10_000
PUBLISHERS_MAX = 10_000
QUEUED_EVENTS_MAX, QUEUED_BYTES_MAX = 4096, 4 * 1024 * 1024  # to be counted, including payloads

FOLLOW_PAGES = 5  # the maximum that one call of `follow` reads


T = TypeVar("T")


class KeyActivity(NamedTuple):
    """The counts of one key."""

    key: str
    events: int
    bytes: int
    events_per_s: float
    last_at_ns: int


class PublisherActivity(NamedTuple):
    """The counts of one publisher on one key."""

    key: str
    publisher_id: int
    sequence: int  # of its last event
    events: int
    last_at_ns: int


class Activity:
    """Counts of one bus, from creation until `close`. Must be used on the event loop.

    activity = Activity(bus)
    activity.topics(limit=50)
    """

    def __init__(
        self,
        bus: zbus.Bus,
        *,
        keys_max: int = KEYS_MAX,
        publishers_max: int = PUBLISHERS_MAX,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._bus, self._clock = bus, clock
        self._keys: Table[str] = Table(keys_max)
        self._publishers: Table[tuple[int, str]] = Table(publishers_max)
        self._queued: list[tuple[float, Sequence[Row], int]] = []
        self._queued_events = self._queued_bytes = 0
        self._followed, self._following = of(bus).head, asyncio.Lock()
        self.log_records = ProblemRecords()
        self._unwatch = of(bus).watch(self.add)

    def close(self) -> None:
        """Stop counting. Calling it again has no effect."""
        self._unwatch()
        self.log_records.close()

    def add(self, rows: Sequence[Row], size: int) -> None:
        """Queue one burst. It is counted with others when many are queued or the counts are read."""
        self._queued.append((self._clock(), rows, size))
        self._queued_events += len(rows)
        self._queued_bytes += size
        if self._queued_events >= QUEUED_EVENTS_MAX or self._queued_bytes >= QUEUED_BYTES_MAX:
            self._count()

    def _count(self) -> None:
        """Count the queued bursts."""
        now = self._clock()
        groups: dict[tuple[int, str], Count] = {}
        for at, rows, size in self._queued:
            gather(groups, rows, size, exp((at - now) / OVER_S) / OVER_S)
        self._queued.clear()
        self._queued_events = self._queued_bytes = 0
        for name, count in groups.items():
            self._keys.add(name[1], count, now)
            self._publishers.add(name, count, now)

    async def follow(self) -> None:
        """Count new events in a log that another process owns, because this bus does not see them otherwise.

        Called before the counts are read. Events beyond `FOLLOW_PAGES` pages are not counted.
        """
        inside = of(self._bus)
        log, head = inside.reader.log, inside.head
        if log is None or not log.read_only:
            return
        async with self._following:
            for _ in range(FOLLOW_PAGES):
                if self._followed >= head:
                    return
                page = await inside.reader.run(log.read, KeySet.all(), Span(self._followed, head), PAGE_EVENTS)
                events, error, _ = page.events(skip_corrupt=True)
                if error is not None:
                    break
                rows = [row_of(each) for each in events]
                if rows:
                    self.add(rows, sum([len(row.payload) for row in rows]))
                self._followed = page.covered
            self._followed = max(self._followed, head)

    def topics(self, shown: Callable[[str], bool], limit: int | None = None) -> list[KeyActivity]:
        """Return the keys for which `shown` is true, busiest first."""
        self._count()
        now = self._clock()
        found = [
            KeyActivity(key, each.events, each.bytes, round(_rate(each, now), 3), each.last_ns)
            for key, each in self._keys.counts.items()
            if shown(key)
        ]
        return _first(found, limit, lambda topic: (-topic.events_per_s, -topic.events, topic.key))

    @property
    def other(self) -> tuple[int, int, int]:
        """The number of evicted keys, their events and their bytes."""
        self._count()
        return self._keys.others, self._keys.other.events, self._keys.other.bytes

    def publishers(self, shown: Callable[[str], bool], limit: int | None = None) -> list[PublisherActivity]:
        """Return the publishers on keys for which `shown` is true, the most recently active first."""
        self._count()
        found = [
            PublisherActivity(key, publisher_id, each.sequence, each.events, each.last_ns)
            for (publisher_id, key), each in self._publishers.counts.items()
            if shown(key)
        ]
        return _first(found, limit, lambda source: (-source.last_at_ns, source.key, source.publisher_id))


def _rate(count: Count, now: float) -> float:
    return count.rate * exp((count.at - now) / OVER_S)


def _first(found: list[T], limit: int | None, order: Callable[[T], tuple[Any, ...]]) -> list[T]:
    return sorted(found, key=order) if limit is None or limit >= len(found) else heapq.nsmallest(limit, found, order)
