"""What happens on which key, and by whom: counted always, many bursts at a time, in bounded memory.

A burst is only noted when it passes, and counted with others when many wait or somebody looks. That takes less than a
fiftieth of what publishing does, so it is never off, and whoever looks for the first time sees what was before. Keys
that were quiet for longest make room for new ones; what they had counts under `other` from then on, so that the sum
of all is always what was seen.
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
NOTED_EVENTS_MAX, NOTED_BYTES_MAX = 4096, 4 * 1024 * 1024  # what waits to be counted, payloads and all

FOLLOW_PAGES = 5  # read in one look at a log of another process


T = TypeVar("T")


class KeyActivity(NamedTuple):
    """What is known of a key."""

    key: str
    events: int
    bytes: int
    events_per_s: float
    last_at_ns: int


class PublisherActivity(NamedTuple):
    """What is known of a publisher on a key."""

    key: str
    publisher_id: int
    sequence: int  # of its last event
    events: int
    last_at_ns: int


class Activity:
    """Counts of one bus, from when it is made until it is closed. Lives on the loop.

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
        self._noted: list[tuple[float, Sequence[Row], int]] = []
        self._noted_events = self._noted_bytes = 0
        self._followed, self._following = of(bus).head, asyncio.Lock()
        self.records = ProblemRecords()
        self._unwatch = of(bus).watch(self.note)

    def close(self) -> None:
        """Count no more. Safe to call twice."""
        self._unwatch()
        self.records.close()

    def note(self, rows: Sequence[Row], size: int) -> None:
        """Take note of one burst; it is counted with others, when many wait or somebody looks."""
        self._noted.append((self._clock(), rows, size))
        self._noted_events += len(rows)
        self._noted_bytes += size
        if self._noted_events >= NOTED_EVENTS_MAX or self._noted_bytes >= NOTED_BYTES_MAX:
            self._count()

    def _count(self) -> None:
        """Count what was noted."""
        now = self._clock()
        groups: dict[tuple[int, str], Count] = {}
        for at, rows, size in self._noted:
            gather(groups, rows, size, exp((at - now) / OVER_S) / OVER_S)
        self._noted.clear()
        self._noted_events = self._noted_bytes = 0
        for name, count in groups.items():
            self._keys.add(name[1], count, now)
            self._publishers.add(name, count, now)

    async def follow(self) -> None:
        """Read on in a log that another process owns, as nothing else passes here then. Whoever looks calls it.

        What is more than a look may take is not counted.
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
                    self.note(rows, sum([len(row.payload) for row in rows]))
                self._followed = page.covered
            self._followed = max(self._followed, head)

    def topics(self, shown: Callable[[str], bool], limit: int | None = None) -> list[KeyActivity]:
        """The keys that are shown, busiest first."""
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
        """Of keys that made room for others: how many there were, their events, and their bytes."""
        self._count()
        return self._keys.others, self._keys.other.events, self._keys.other.bytes

    def publishers(self, shown: Callable[[str], bool], limit: int | None = None) -> list[PublisherActivity]:
        """The publishers on keys that are shown, the last to publish first."""
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
