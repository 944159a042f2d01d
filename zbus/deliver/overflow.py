"""Overflow policies: what a subscription does with events that its queue has no capacity for.

A policy is a class. To add one, write a subclass of `Policy` with the method `overflow`, and add its name to
`Overflow` and `POLICIES` below. Nothing else knows the policies by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from zbus.event import Event
from zbus.observe.records import EVENT_DROPPED, record_reason
from zbus.observe.throttle import Throttle

from .buffer import Backlog, Buffer
from .host import Host

BACKLOG_BYTES_MAX = 16 * 1024 * 1024
REPORT_EVERY_S = 1.0  # while events are dropped; the counters have every one

# Why events were dropped: the code in records, which is also the counter's name after `dropped_`, and the sentence.
QUEUE_FULL = "queue_full", "a subscription's queue is full"
BACKLOG_FULL = "backlog_full", "a subscription is not read, and the backlog beside its queue is full"


class OverflowTarget(Protocol):
    """The subscription of a policy, as the policy sees it. The object itself is a reason for backpressure."""

    @property
    def key_exprs(self) -> tuple[str, ...]:
        """The key expressions of the subscription."""


class Policy:
    """One policy of one subscription. Lives on the event loop.

    `overflow` is called with events that fill the queue or are too many for it, so it costs nothing before.
    """

    name: Overflow
    drops = False  # loses events, so a durable subscription cannot use it
    needs_log = False  # reads from the log, so events of other nodes are stored there
    follows_reads = False  # from now on, call `taken` for each event that is taken from the queue

    def __init__(self, subscription: OverflowTarget, queue: Buffer, host: Host) -> None:
        self._subscription, self._queue = subscription, queue
        self._count, self._runtime = host.dispatcher.count, host.runtime
        self._throttle = Throttle(REPORT_EVERY_S, host.runtime.monotonic)
        self.dropped = 0

    def overflow(self, events: Sequence[Event], received: bool) -> int:
        """Take events of which the queue can hold some or none; return how many were taken, from the first on.

        Taken means queued, kept elsewhere, or dropped with `drop`. The subscription continues from the log with the
        events that were not taken, which is possible only if they have an offset. `received` is true for events that
        no publisher of this node waits for: those of other nodes, and those of the bus itself.
        """
        raise NotImplementedError

    def taken(self) -> None:
        """An event was taken from the queue. Called while `follows_reads` is true."""

    def joined(self) -> None:
        """The subscription read the log up to its head and receives live events again."""

    def closed(self) -> None:
        """The subscription was closed. Events that wait can still be read."""

    @property
    def waiting(self) -> int:
        """The number of events that wait beside the queue."""
        return 0

    def drop(self, events: Sequence[Event], why: tuple[str, str], behind: Buffer | None = None) -> None:
        """Drop events that follow what is queued, or what waits in `behind`: the subscriber is notified there."""
        (self._queue if behind is None else behind).drop_newest(events)
        self.count_dropped(len(events), why)

    def count_dropped(self, events: int, why: tuple[str, str]) -> None:
        """Count dropped events, and write a record, once a second at most."""
        code, reason = why
        self.dropped += events
        self._count(f"dropped_{code}", events)
        if events and self._throttle.due(code):
            fields = {"keys": self._subscription.key_exprs, "policy": self.name, "dropped_total": self.dropped}
            with self._runtime.running():
                record_reason(EVENT_DROPPED, logging.WARNING, code=code, reason=reason, **fields)


class DropOldest(Policy):
    """Keep the newest events. The subscriber is notified before the next event."""

    name = "drop_oldest"
    drops = True

    def overflow(self, events: Sequence[Event], received: bool) -> int:
        """Queue the events and drop the oldest ones."""
        self.count_dropped(self._queue.drop_oldest(events), QUEUE_FULL)
        return len(events)


class DropNewest(Policy):
    """Keep the oldest events. The subscriber is notified after the last event before the gap."""

    name = "drop_newest"
    drops = True

    def overflow(self, events: Sequence[Event], received: bool) -> int:
        """Queue what fits and drop the rest."""
        fits = self._queue.fill(events)
        if fits < len(events):
            self.drop(events[fits:], QUEUE_FULL)
        return len(events)


class Spill(Policy):
    """Continue from the log, and receive live events again after catching up. Nothing that the log has is lost.

    Events that no log has, such as those of the bus itself, are dropped as with "drop_newest".
    """

    name = "spill"
    needs_log = True

    def overflow(self, events: Sequence[Event], received: bool) -> int:
        """Queue what fits. The rest is read from the log."""
        fits = self._queue.fill(events)
        if fits < len(events) and not events[0].offset:
            self.drop(events[fits:], QUEUE_FULL)
            return len(events)
        return fits


class Block(Policy):
    """Publishers wait while the queue is full, until the subscriber has read half of it.

    For publishers of this node: `publish`, `publish_many` and `put` on the keys of this subscription wait, and none of
    their events is dropped. Events that were already in flight wait in a backlog beside the queue.

    For events of other nodes: their publishers do not wait, because that would stop the other subscriptions of this
    node too. The events wait in the same backlog, `BACKLOG_BYTES_MAX` bytes at most. Beyond that, the subscription
    continues from the log of this node if the log has the events (`durable=`, `keep=`), as "spill" does, and nothing is
    lost. Events that are not in this log are dropped and counted (`dropped_backlog_full`), and the subscriber receives
    `SubscriberLagged` after the last event before them.
    """

    name = "block"

    def __init__(self, subscription: OverflowTarget, queue: Buffer, host: Host) -> None:
        super().__init__(subscription, queue, host)
        self._backpressure = host.backpressure
        self._backlog = Backlog(BACKLOG_BYTES_MAX)
        self._behind = False

    @property
    def waiting(self) -> int:
        """The number of events in the backlog."""
        return self._backlog.events

    def overflow(self, events: Sequence[Event], received: bool) -> int:
        """Queue what fits, keep the rest in the backlog, and block publishers."""
        taken = self._queue.fill(events)  # none while something is in the backlog: the queue is full then
        if taken < len(events):
            rest = events[taken:]
            kept = self._keep(rest, received)
            self._count("backlogged", kept)
            taken += kept
            if kept < len(rest) and not rest[0].offset:
                self.drop(rest[kept:], BACKLOG_FULL, self._backlog)
                taken = len(events)
        self._behind = taken < len(events)
        if not self._queue.free:
            self.follows_reads = True
            self._backpressure.block(self._subscription, *QUEUE_FULL)
        return taken

    def taken(self) -> None:
        """Fill the queue from the backlog. Once both are short enough, publishers continue."""
        self._backpressure.progressed(self._subscription)
        self._backlog.move_to(self._queue)
        if not self._behind and self._queue.events <= self._queue.capacity // 2:
            self.follows_reads = False
            self._backpressure.unblock(self._subscription)

    def joined(self) -> None:
        """Everything was read from the log: publishers continue if the queue is short enough."""
        self._behind = False
        self.taken()

    def closed(self) -> None:
        """Publishers no longer wait for this subscription."""
        self._backpressure.unblock(self._subscription)

    def _keep(self, events: Sequence[Event], received: bool) -> int:
        if received or events[0].offset:
            return self._backlog.fill(events)
        self._backlog.add(events)  # no log has them, and their publishers wait from now on: these are the last ones
        return len(events)


Overflow = Literal["drop_oldest", "drop_newest", "block", "spill"]
POLICIES: Mapping[Overflow, type[Policy]] = {each.name: each for each in (DropOldest, DropNewest, Block, Spill)}
