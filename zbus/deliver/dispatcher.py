"""Delivery inside a node, from the log's tail, from publishers without a log, and from other nodes.

The newest stored events stay in memory, so that a subscription that reads the log catches up with the live events
without a gap: after the log's last page it continues from memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from zbus.event import Event
from zbus.headers import NO_HEADERS, Headers
from zbus.keys import KeySet
from zbus.observe.burst_records import BurstRecords
from zbus.observe.histogram import Histogram
from zbus.observe.records import wanted
from zbus.ports.cache import Target
from zbus.ports.log import Row
from zbus.util.runtime import Runtime

from .key_trie import KeyTrie

RECENT_EVENTS = 8192
RECENT_BYTES = 16 * 1024 * 1024


# Called with each batch that is stored here, or published without a log, and the size of its payloads. It runs on the
# loop, on the path of every event.
Watcher = Callable[[Sequence[Row], int], None]


class RemoteInterest(Protocol):
    """Requests events from other nodes: the network."""

    def add_interest(
        self, expressions: Sequence[str], since_ns: int, store: bool, keep: bool = False
    ) -> asyncio.Future[Any]:
        """Receive matching events from other nodes. The future completes when the transports know."""

    def remove_interest(self, expressions: Sequence[str], since_ns: int, store: bool) -> None:
        """Undo one `add_interest`."""


class LocalSubscription(Target, Protocol):
    """A subscription of this node, as the dispatcher sees it."""

    durable: str | None
    subscriber: Any  # the object that users read from

    def end(self) -> None:
        """End the stream after the queued events."""

    async def aclose(self) -> None:
        """Close the subscription."""

    def moved(self) -> None:
        """The head of a log that another process owns has moved."""

    def checks_changed(self) -> None:
        """The registered schemas have changed."""


class Dispatcher:
    """Lives on the event loop, like the subscriptions it delivers to."""

    def __init__(
        self,
        count: Callable[[str, int], None],
        burst_records: BurstRecords,
        runtime: Runtime,
        taken: Histogram | None = None,
    ) -> None:
        self.count, self._time_ns, self._taken = count, runtime.time_ns, taken
        self._burst_records = burst_records
        self.interest: RemoteInterest | None = None  # set while the node has a network
        self.subscriptions: dict[LocalSubscription, None] = {}  # the open ones, in the order of opening
        self.crowded = False  # a queue is half full: a publisher that never waits should yield to the subscribers
        self.trie: KeyTrie[Target] = KeyTrie()
        self.deliveries = 0  # events delivered to live subscriptions, once per subscription
        self.delivered = 0  # every stored event up to this offset was delivered to the live subscriptions
        self.watchers: tuple[Watcher, ...] = ()
        # The newest stored batches: rows, offsets, the size of the payloads, and the last offset before them.
        self._recent: deque[tuple[Sequence[Row], Sequence[int], int, int]] = deque()
        self._recent_events = self._recent_bytes = 0
        # Identities, soon stored, that live subscriptions already had or do not match.
        self.passed: set[tuple[int, int]] = set()

    def attach(self, subscription: LocalSubscription) -> asyncio.Future[Any] | None:
        """Deliver to a new subscription. The future completes when its events are requested from other nodes."""
        self.subscriptions[subscription] = None
        return self.route(subscription, keep=subscription.durable is not None)

    def detach(self, subscription: LocalSubscription) -> None:
        """Stop delivering to a subscription."""
        if subscription in self.subscriptions:
            del self.subscriptions[subscription]
            self.unroute(subscription)

    def route(self, target: Target, *local: str, keep: bool = False) -> asyncio.Future[Any] | None:
        """Deliver to a target. The future completes when its events are requested from other nodes.

        `local` expressions are delivered from this node only. `keep` is passed on to `RemoteInterest.add_interest`.
        """
        for expression in (*target.key_exprs, *local):
            self.trie.add(expression, target)
        if self.interest is None:
            return None
        return self.interest.add_interest(target.key_exprs, target.since_ns, target.records, keep=keep)

    def unroute(self, target: Target, *local: str) -> None:
        """Undo `route`."""
        for expression in (*target.key_exprs, *local):
            self.trie.remove(expression, target)
        if self.interest is not None:
            self.interest.remove_interest(target.key_exprs, target.since_ns, target.records)

    def head_moved(self, head: int) -> None:
        """The head of a log that another process owns has moved: wake the subscriptions."""
        if head > self.delivered:
            self.delivered = head
            for subscription in self.subscriptions:
                subscription.moved()

    def stored(self, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        """Deliver a part of the log's tail."""
        routes, passed, size = self.trie.routes, self.passed, 0
        gathered: dict[Target, list[Event]] = {}
        for row, offset in zip(rows, offsets, strict=True):
            size += len(row.payload)
            targets = routes(row.key)
            if passed and (row.publisher_id, row.sequence) in passed:
                targets = tuple(target for target in targets if target.records)
            if targets:
                headers = row.headers  # `row.event(offset)` without its call: this is done for every event
                event = Event(
                    row.publisher_id,
                    row.sequence,
                    row.published_at,
                    row.key,
                    row.payload,
                    Headers(headers) if headers else NO_HEADERS,
                    offset,
                    row.provenance,
                )
                for target in targets:
                    if target in gathered:
                        gathered[target].append(event)
                    else:
                        gathered[target] = [event]
        if gathered:
            self._offer(gathered, received=False)
        before, self.delivered = self.delivered, offsets[-1]
        self._recent.append((rows, offsets, size, before))
        self._recent_events += len(rows)
        self._recent_bytes += size
        while self._recent_events > RECENT_EVENTS or self._recent_bytes > RECENT_BYTES:
            gone, _, gone_bytes, _ = self._recent.popleft()
            self._recent_events -= len(gone)
            self._recent_bytes -= gone_bytes
        for watch in self.watchers:
            watch(rows, size)

    def unlogged(self, rows: Sequence[Row]) -> None:
        """Deliver rows of one key without a log. Events are made only if a subscription matches."""
        for watch in self.watchers:
            watch(rows, sum([len(row.payload) for row in rows]))
        targets = self.trie.routes(rows[0].key)
        if targets:
            events = [
                Event(  # `row.event()` without its call: this is done for every event
                    row.publisher_id,
                    row.sequence,
                    row.published_at,
                    row.key,
                    row.payload,
                    Headers(row.headers) if row.headers else NO_HEADERS,
                )
                for row in rows
            ]
            taken = 0
            for target in targets:
                taken += target.offer(events)
            self.deliveries += taken
            if self._taken is not None:
                self._taken.buckets[0] += taken  # age 0: reading the clock would take longer
            if taken and wanted(logging.DEBUG):
                self._burst_records.received([events] * len(targets))

    def unstored(self, events: Sequence[Event]) -> None:
        """Deliver events that the log of this node does not have."""
        routes = self.trie.routes
        gathered: dict[Target, list[Event]] = {}
        key, targets = "", routes(events[0].key)
        for event in events:
            if event.key != key:
                key, targets = event.key, routes(event.key)
            for target in targets:
                gathered.setdefault(target, []).append(event)
        if gathered:
            self._offer(gathered, received=True)

    def recent_after(self, offset: int, limit: int, keys: KeySet) -> list[Event] | None:
        """Return the delivered events of some keys after `offset`, or None if memory lacks some or they exceed `limit`.

        An event that was read from the log but not delivered yet has an offset over `delivered`: nothing follows it.
        """
        if self.delivered <= offset:
            return []
        if not self._recent or self._recent[0][3] > offset:
            return None
        found: list[Event] = []
        for rows, offsets, _, _ in reversed(self._recent):
            if offsets[-1] <= offset:
                break
            for row, at in zip(reversed(rows), reversed(offsets), strict=True):
                if at <= offset:
                    break
                if row.key in keys:
                    if len(found) == limit:
                        return None
                    found.append(row.event(at))
        found.reverse()
        return found

    def _offer(self, gathered: Mapping[Target, list[Event]], received: bool) -> None:
        """Deliver the gathered events, in one call per target."""
        taken = []
        for target, events in gathered.items():
            if number := target.offer(events, received):
                self.deliveries += number
                taken.append(events)
        if taken and self._taken is not None:
            self._taken.add_ages(self._time_ns(), [event.published_at for events in taken for event in events])
        if taken and wanted(logging.DEBUG):
            self._burst_records.received(taken)
