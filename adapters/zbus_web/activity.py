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
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from zbus.introspection import watch
from zbus.keys import KeySet
from zbus.ports import Row, Span
from zbus.subscriber import PAGE_EVENTS

from .records import Records

if TYPE_CHECKING:
    import zbus

    from .live import Live

KEYS_MAX = 10_000
PUBLISHERS_MAX = 10_000
OVER_S = 3.0  # rates are of about as long: what is older counts ever less
NOTED_EVENTS_MAX, NOTED_BYTES_MAX = 4096, 4 * 1024 * 1024  # what waits to be counted, payloads and all

FOLLOW_PAGES = 5  # read in one look at a log of another process

_PUBLISHER, _KEY = itemgetter(0), itemgetter(3)

K = TypeVar("K")
T = TypeVar("T")


class Topic(NamedTuple):
    """What is known of a key."""

    key: str
    events: int
    bytes: int
    events_per_s: float
    last_at_ns: int


class Source(NamedTuple):
    """What is known of a publisher on a key."""

    key: str
    publisher_id: int
    sequence: int  # of its last event
    events: int
    last_at_ns: int


class _Count:
    __slots__ = ("at", "bytes", "events", "last_ns", "rate", "sequence")

    def __init__(self) -> None:
        self.events = self.bytes = self.last_ns = self.sequence = 0
        self.rate = self.at = 0.0  # events a second, as of when

    def add(self, other: _Count, now: float) -> None:
        self.events += other.events
        self.bytes += other.bytes
        self.rate = self.rate * exp((self.at - now) / OVER_S) + other.rate
        self.sequence, self.last_ns, self.at = other.sequence, other.last_ns, now


class _Table(Generic[K]):
    """Counts by name. Full, it sums up the tenth that was quiet for longest."""

    __slots__ = ("counts", "other", "others", "size")

    def __init__(self, size: int) -> None:
        self.size, self.counts = size, dict[K, _Count]()
        self.other, self.others = _Count(), 0  # and how many names went there

    def add(self, name: K, count: _Count, now: float) -> None:
        found = self.counts.get(name)
        if found is None:
            if len(self.counts) >= self.size:
                self._make_room()
            found = self.counts[name] = _Count()
        found.add(count, now)

    def _make_room(self) -> None:
        number = max(1, self.size // 10)
        for name in heapq.nsmallest(number, self.counts, key=lambda name: self.counts[name].at):
            gone = self.counts.pop(name)
            self.other.events += gone.events
            self.other.bytes += gone.bytes
            self.other.last_ns = max(self.other.last_ns, gone.last_ns)
            self.others += 1


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
        self._keys: _Table[str] = _Table(keys_max)
        self._publishers: _Table[tuple[int, str]] = _Table(publishers_max)
        self._noted: list[tuple[float, Sequence[Row], int]] = []
        self._noted_events = self._noted_bytes = 0
        self._followed, self._following = bus.delivery.delivered, asyncio.Lock()
        self.records = Records()
        self.live: Live | None = None
        self._unwatch = watch(bus, self.note)

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
        groups: dict[tuple[int, str], _Count] = {}
        for at, rows, size in self._noted:
            _gather(groups, rows, size, exp((at - now) / OVER_S) / OVER_S)
        self._noted.clear()
        self._noted_events = self._noted_bytes = 0
        for name, count in groups.items():
            self._keys.add(name[1], count, now)
            self._publishers.add(name, count, now)

    async def follow(self) -> None:
        """Read on in a log that another process owns, as nothing else passes here then. Whoever looks calls it.

        What is more than a look may take is not counted.
        """
        log, head = self._bus.log, self._bus.delivery.delivered
        if log is None or not log.read_only:
            return
        async with self._following:
            for _ in range(FOLLOW_PAGES):
                if self._followed >= head:
                    return
                page = await self._bus.run(log.read, KeySet.all(), Span(self._followed, head), PAGE_EVENTS)
                events, error, _ = page.events(skip_corrupt=True)
                if error is not None:
                    break
                rows = [
                    (each.publisher_id, each.sequence, each.published_at, each.key, each.payload, None)
                    for each in events
                ]
                if rows:
                    self.note(rows, sum([len(row[4]) for row in rows]))
                self._followed = page.covered
            self._followed = max(self._followed, head)

    def topics(self, shown: Callable[[str], bool], limit: int | None = None) -> list[Topic]:
        """The keys that are shown, busiest first."""
        self._count()
        now = self._clock()
        found = [
            Topic(key, each.events, each.bytes, round(_rate(each, now), 3), each.last_ns)
            for key, each in self._keys.counts.items()
            if shown(key)
        ]
        return _first(found, limit, lambda topic: (-topic.events_per_s, -topic.events, topic.key))

    @property
    def other(self) -> tuple[int, int, int]:
        """Of keys that made room for others: how many there were, their events, and their bytes."""
        self._count()
        return self._keys.others, self._keys.other.events, self._keys.other.bytes

    def publishers(self, shown: Callable[[str], bool], limit: int | None = None) -> list[Source]:
        """The publishers on keys that are shown, the last to publish first."""
        self._count()
        found = [
            Source(key, publisher_id, each.sequence, each.events, each.last_ns)
            for (publisher_id, key), each in self._publishers.counts.items()
            if shown(key)
        ]
        return _first(found, limit, lambda source: (-source.last_at_ns, source.key, source.publisher_id))


def _gather(groups: dict[tuple[int, str], _Count], rows: Sequence[Row], size: int, weight: float) -> None:
    """Add a burst, by publisher and key. Large ones are mostly of one publisher, which a look at two lists tells."""
    publisher_id, sequence, published_at, key, payload, _ = rows[-1]
    number = len(rows)
    if number > 1 and not (
        list(map(_PUBLISHER, rows)).count(publisher_id) == number == list(map(_KEY, rows)).count(key)
    ):
        for publisher_id, sequence, published_at, key, payload, _ in rows:
            count = groups.get((publisher_id, key))
            if count is None:
                count = groups[publisher_id, key] = _Count()
            count.events += 1
            count.bytes += len(payload)
            count.rate += weight
            count.sequence, count.last_ns = sequence, published_at
        return
    count = groups.get((publisher_id, key))
    if count is None:
        count = groups[publisher_id, key] = _Count()
    count.events += number
    count.bytes += size
    count.rate += weight * number
    count.sequence, count.last_ns = sequence, published_at


def _rate(count: _Count, now: float) -> float:
    return count.rate * exp((count.at - now) / OVER_S)


def _first(found: list[T], limit: int | None, order: Callable[[T], tuple[Any, ...]]) -> list[T]:
    return sorted(found, key=order) if limit is None or limit >= len(found) else heapq.nsmallest(limit, found, order)
