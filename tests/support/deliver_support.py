"""Delivery without a bus: a host with a real dispatcher and a log in memory, whose offsets have gaps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from zbus.deliver.dispatcher import Dispatcher
from zbus.deliver.log_reader import LogReader
from zbus.deliver.overflow import Overflow
from zbus.deliver.subscriber import EventSubscriber, Start
from zbus.errors import LogError
from zbus.event import Event
from zbus.keys import KeySet
from zbus.observe.burst_records import BurstRecords
from zbus.ports.lineage import Incarnation, Lineage
from zbus.ports.log import Log, Row, Span
from zbus.publish.backpressure import Backpressure
from zbus.util.runtime import Runtime

KEY = "a/b"


class FakePage(NamedTuple):
    """A page of `FakeLog`."""

    found: list[Event]
    covered: int
    skipped: int = 0
    error: LogError | None = None
    low_water: int = 0

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        return self.found, self.error, self.skipped


class FakeLog:
    """Only what subscriptions call. The offsets rise by `step`."""

    read_only = False
    lineage = Lineage((Incarnation(3, 1),))

    def __init__(self, step: int = 1) -> None:
        self.stored: list[Event] = []
        self._step = step
        self.skipped = 0  # corrupt events that the next page reports
        self.bad: int | None = None  # the offset of an event that cannot be read: a page ends before it
        self.pages = 0

    @property
    def head_offset(self) -> int:
        return self.stored[-1].offset if self.stored else 0

    def add(self, rows: Sequence[Row]) -> list[int]:
        for row in rows:
            self.stored.append(row.event(self.head_offset + self._step))
        return [event.offset for event in self.stored[-len(rows) :]]

    def before(self, offset: int) -> int:
        return offset - 1

    def digest(self, offset: int) -> bytes:
        return b"%d" % offset

    def read(self, keys: KeySet, span: Span, limit: int) -> FakePage:
        self.pages += 1
        found = [event for event in self.stored if event.offset > span.after and event.key in keys]
        covered = found[limit - 1].offset if len(found) > limit else self.head_offset
        skipped, self.skipped = self.skipped, 0
        if self.bad is not None and span.after < self.bad <= covered:
            good = [event for event in found[:limit] if event.offset < self.bad]
            return FakePage(good, covered, skipped, LogError("a bad event"))
        return FakePage(found[:limit], max(span.after, covered), skipped)


class FakeHost:
    """What subscriptions need from a node. Nothing here starts a thread."""

    validators = tracing = None

    def __init__(self, log: FakeLog | None = None) -> None:
        self.now = 0.0
        self.runtime = Runtime()
        self.runtime.monotonic = lambda: self.now
        self.counts: Counter[str] = Counter()
        self.dispatcher = Dispatcher(self.count, BurstRecords(self.runtime), self.runtime)
        self.backpressure = Backpressure(self.runtime)
        self.log = log
        self.reader = LogReader(cast("Log | None", log), self._run, False)
        self._sequences: Counter[int] = Counter()

    def count(self, name: str, events: int) -> None:
        self.counts[name] += events

    def subscribe(
        self, *key_exprs: str, overflow: Overflow = "drop_oldest", queue_events: int = 4, start: Start = "new"
    ) -> EventSubscriber:
        return EventSubscriber(
            self,
            KeySet(key_exprs or ("**",)),
            start=start,
            after=None,
            durable=None,
            queue_events=queue_events,
            overflow=overflow,
            schema=None,
        )

    def store(self, events: int, key: str = KEY) -> None:
        """Publish to a bus with a log, whose commit has come back."""
        assert self.log is not None
        rows = self.rows(events, 1, key)
        self.dispatcher.stored(rows, self.log.add(rows))

    def send(self, events: int, key: str = KEY) -> None:
        """Publish to a bus without a log."""
        self.dispatcher.unlogged(self.rows(events, 2, key))

    def receive(self, events: int, key: str = KEY, payload: bytes = b"") -> None:
        """Receive events of another node that the log of this one does not store."""
        self.dispatcher.unstored([row.event() for row in self.rows(events, 3, key, payload)])

    def rows(self, events: int, publisher_id: int, key: str = KEY, payload: bytes = b"") -> list[Row]:
        first = self._sequences[publisher_id]
        self._sequences[publisher_id] += events
        return [Row(publisher_id, first + n, 1, key, payload, None) for n in range(events)]

    def _run(self, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        result = call(*args)
        loop.call_soon(lambda: None if future.done() else future.set_result(result))
        return future


async def soon(subscription: EventSubscriber, turns: int = 20) -> Event | None:
    """The next event, if it comes within a few turns of the loop. Raises what the subscription raises."""
    reading = asyncio.ensure_future(subscription.next())
    for _ in range(turns):
        await asyncio.sleep(0)
        if reading.done():
            return reading.result()
    reading.cancel()
    await asyncio.wait([reading])
    return None


def waits(host: FakeHost, key: str = KEY) -> bool:
    """Whether a publisher of this key has to wait."""
    targets = host.dispatcher.trie.routes(key)
    return host.backpressure.applies(lambda reasons: not reasons.isdisjoint(targets))
