"""A subscription: a bounded queue between the bus and one subscriber.

The bus must never wait for a slow subscriber, and memory must never grow without limit. An overflow policy
(`overflow.py`) decides what happens when the queue is full: events are dropped and the subscriber is notified
(`SubscriberLagged`), publishers wait, or the subscriber continues from the log and receives live events again after
catching up. Every stored event carries its offset, so nothing is missed or repeated at that seam.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, TypeVar

from zbus.errors import ConfigInvalid, LogError, LogRequired, LogTrimmed, SubscriberLagged, WrongLoop, ZbusError
from zbus.event import DeliveryHandle, Event
from zbus.keys import KeySet
from zbus.observe.records import EVENT_SUBSCRIBER_SLOW, record_reason
from zbus.ports.log import Span
from zbus.scope import Scope
from zbus.util.renamed import Renamed

from .acknowledgements import Acknowledgements
from .buffer import Backlog, Buffer
from .host import Host
from .log_reader import STALE_S
from .overflow import BACKLOG_BYTES_MAX, BACKLOG_FULL, POLICIES, Overflow
from .retention_gap import report_retention_gap
from .start_position import check_offset_or_time, to_ns

T = TypeVar("T")
Start = Literal["new", "beginning"] | int | datetime

PAGE_EVENTS, PAGE_EVENTS_MIN = 1000, 128
IDLE_S = 0.5


class _Inlet:
    """The side of a subscription that the dispatcher delivers to. Users see only `EventSubscriber`."""

    records = False  # whether events of other nodes are stored in the log of this node, and delivered from there
    since_ns = 0

    def __init__(self, subscriber: EventSubscriber) -> None:
        self.subscriber, self.durable, self.key_exprs = subscriber, subscriber.durable, subscriber.key_exprs
        # Methods of the subscription itself: a call in between would cost something for every burst.
        self.offer, self.end, self.moved = subscriber._offer, subscriber._end, subscriber._wake
        self.checks_changed, self.aclose = subscriber._checks_changed, subscriber.aclose


class EventSubscriber:
    """A stream of events: `async with bus.subscribe("shop/**") as sub: async for event in sub: …`.

    It receives events from the moment it is made. One task at a time reads from it. If a read is cancelled, nothing is
    lost: the next read returns the same event. Closing the subscription or the bus ends the stream after the events
    that are already queued.
    """

    def __init__(
        self,
        host: Host,
        keys: KeySet,
        *,
        start: Start,
        after: int | datetime | None,
        durable: str | None,
        queue_events: int,
        overflow: Overflow,
        schema: Any,
    ) -> None:
        self._host, self._dispatcher, self._reader = host, host.dispatcher, host.reader
        self._loop = asyncio.get_running_loop()
        self._keys, self._start, self._after = keys, start, after
        self.durable, self.schema, self.overflow = durable, schema, overflow
        self.queue_events = queue_events
        self._buffer = Buffer(queue_events)
        self._queue = self._buffer.items
        self._inlet = _Inlet(self)
        self._policy = POLICIES[overflow](self._inlet, self._buffer, host)
        self._aside: Backlog | None = None  # events that no log has, while this subscription reads the log
        self._bound = durable is not None or schema is not None
        self._tracing = host.tracing
        self._checks_changed()
        self._waiter: asyncio.Future[None] | None = None
        self._failed: LogError | None = None
        self._closed = self._reading = self._woken = False
        self._position = self._dispatcher.delivered  # everything up to here is queued, handed over, or does not match
        self._handed = self._position
        self._durable: Acknowledgements | None = None
        if durable is not None:
            cursors = self._reader.required("a durable subscription").cursors
            self._durable = Acknowledgements(cursors, self._reader.run, durable, keys.expressions, host.runtime)
        self._handle = DeliveryHandle(schema, self._durable.acknowledge if self._durable is not None else None)
        self._resolved = start == "new" and after is None and durable is None
        self._from_oldest = False  # whether to begin with the oldest event, whatever retention removed before
        self._live = self._resolved and not self._reader.read_only
        self._inlet.records = self._reader.log is not None and (durable is not None or self._policy.needs_log)
        if start != "beginning":
            moment = start if after is None else after
            self._inlet.since_ns = to_ns(moment) if isinstance(moment, datetime) else host.runtime.steady_ns()
        self._declared = self._dispatcher.attach(self._inlet)

    take, nudge, declared = Renamed("next_batch"), Renamed("wake"), Renamed("ready")

    @classmethod
    async def for_namespace(cls, scope: Scope, topic: str, **options: Any) -> EventSubscriber:
        """Subscribe to a topic of a namespace and wait until the transports know. Options as for `bus.subscribe`."""
        subscription: EventSubscriber = scope.bus.subscribe(scope.key(topic, "namespace"), **options)
        return await subscription.ready()

    @classmethod
    async def for_component(cls, scope: Scope, topic: str, **options: Any) -> EventSubscriber:
        """Subscribe to a topic of a component and wait until the transports know. Options as for `bus.subscribe`."""
        subscription: EventSubscriber = scope.bus.subscribe(scope.key(topic, "component"), **options)
        return await subscription.ready()

    @classmethod
    async def for_endpoint(cls, scope: Scope, topic: str, **options: Any) -> EventSubscriber:
        """Subscribe to a topic of an endpoint and wait until the transports know. Options as for `bus.subscribe`."""
        subscription: EventSubscriber = scope.bus.subscribe(scope.key(topic, "endpoint"), **options)
        return await subscription.ready()

    async def ready(self) -> EventSubscriber:
        """Wait until the transports know this subscription; `async with` does this. Closes it if cancelled."""
        if self._declared is not None:
            try:
                await asyncio.shield(self._declared)
            except BaseException:
                await self.aclose()
                raise
        return self

    @property
    def key_exprs(self) -> tuple[str, ...]:
        """The key expressions of this subscription."""
        return self._keys.expressions

    @property
    def queued(self) -> int:
        """The number of events in memory: at most `queue_events`, a page of the log, or the backlog of "block"."""
        return self._buffer.events + self._policy.waiting

    @property
    def dropped(self) -> int:
        """The number of events that this subscription has dropped. `SubscriberLagged` reports each of them."""
        return self._policy.dropped

    @property
    def acknowledged(self) -> int | None:
        """The offset up to which a durable subscription has acknowledged; None if not durable, or not claimed yet."""
        return self._durable.acknowledged if self._durable is not None and self._resolved else None

    @property
    def position(self) -> int:
        """The offset to resume after: everything up to here was handed over, or does not match this subscription."""
        if self._queue:
            return self._handed
        return max(self._position, self._dispatcher.delivered) if self._live else self._position

    @property
    def is_live(self) -> bool:
        """Whether events arrive as they are published, rather than from the log."""
        return self._live

    def __aiter__(self) -> EventSubscriber:
        return self

    async def __anext__(self) -> Event:
        queue = self._queue
        if self._plain and queue:
            first = queue.popleft()
            if type(first) is Event:
                self._handed = first.offset or self._handed
                return first
            queue.appendleft(first)
        if self._durable is not None and self._resolved:
            self._durable.handled(self._handed)  # asking for the next event acknowledges the last
        while True:
            if queue:
                if type(queue[0]) is not Event:
                    raise self._lagged()
                item: Event = queue.popleft()  # type: ignore[assignment]  # its type was just checked
                if self._policy.follows_reads:
                    self._policy.taken()
                    self._checks_changed()
                if item.offset:
                    self._handed = item.offset
                if (validators := self._host.validators) is not None:
                    validators.validate_received(item)
                if self.schema is not None:
                    item.decode()  # raises here if the payload does not match; the subscriber may decode it again
                if self._tracing is not None:
                    self._tracing.received(item, self.durable)
                return item
            if self._failed is not None:
                failed, self._failed = self._failed, None
                raise failed
            if self._closed:
                raise StopAsyncIteration
            await self._refill()

    async def next(self) -> Event | None:
        """Return the next event, or None if the subscription or the bus was closed."""
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            return None

    async def next_batch(self, limit: int = PAGE_EVENTS) -> list[Event] | None:
        """Return the events that wait now, at most `limit` and in order; wait for one if there are none.

        A burst costs one step of the loop instead of one per event. Events that are validated, traced or
        acknowledged still come one at a time. Returns [] after `wake` if no event waits, and None if the
        subscription or the bus was closed.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ConfigInvalid("limit", f"{limit!r} must be a whole number, at least 1")
        while not (self._queue or self._woken or self._closed or self._failed):
            await self._refill()
        woken, self._woken = self._woken, False
        if woken and not (self._queue or self._closed or self._failed):
            return []
        first = await self.next()
        if first is None:
            return None
        taken, queue = [first], self._queue
        if self._plain:
            while queue and len(taken) < limit and type(queue[0]) is Event:
                taken.append(queue.popleft())  # type: ignore[arg-type]
            self._handed = taken[-1].offset or self._handed
        return taken

    def wake(self) -> None:
        """Let `next_batch` return, now or when it is next called, even if no event waits. Call it on the loop."""
        self._woken = True
        self._wake()

    async def typed(self, type_: type[T]) -> AsyncIterator[tuple[Event, T]]:
        """Iterate over events with their payloads as `type_`: `async for event, order in sub.typed(Order): …`."""
        async for event in self:
            yield event, event.decode(type_)

    async def __aenter__(self) -> EventSubscriber:
        try:
            await self.ready()
            await self._resolve()
        except BaseException:
            await self.aclose()  # `__aexit__` is not called if entering fails
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop receiving. Queued events can still be read. Stores the position of a durable subscription.

        If cancelled, it still closes, and the position is stored in the background.
        """
        already, self._closed = self._closed, True
        if not already:
            self._live = False
            self._policy.closed()
            self._dispatcher.detach(self._inlet)
            self._wake()
        if self._durable is not None:
            await self._durable.release()

    # Called by the dispatcher, on the loop, through `_Inlet`.

    def _offer(self, events: Sequence[Event], received: bool = False) -> int:
        """Take live events without waiting. Returns how many of them the subscriber reads, or is notified of."""
        if not self._live:
            return self._set_aside(events)
        if 0 < events[0].offset <= self._position:
            events = [event for event in events if event.offset > self._position]
            if not events:
                return 0
        if self._bound:
            events = [event._with(self._handle) for event in events]
        queue, taken = self._queue, len(events)
        if len(queue) + taken < self.queue_events:
            queue.extend(events)
            self._position = events[-1].offset or self._position
        else:
            taken = self._overflow(events, received)
        if len(queue) * 2 >= self.queue_events:
            self._dispatcher.crowded = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return taken

    def _end(self) -> None:
        """End the stream after the queued events, because the bus is closing."""
        self._closed, self._live = True, False
        self._wake()

    def _checks_changed(self) -> None:
        """Decide again whether reading an event only takes it from the queue, for example after a schema changed."""
        unchecked = self._host.validators is None and self._tracing is None
        self._plain = not self._bound and not self._policy.follows_reads and unchecked

    # Waiting for live events, and reading the log.

    async def _refill(self) -> None:
        """Wait for live events, or read the next page of the log."""
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop("read a subscription")
        if self._reading:
            raise ZbusError("this subscription is already being read by another task; open one for each")
        self._reading = True
        try:
            if not self._resolved:
                await self._resolve()
            if self._live or self._join_live():
                if not self._queue and not self._closed:
                    await self._sleep()
            elif self._reader.read_only and self._position >= self._dispatcher.delivered:
                await self._sleep()
            else:
                await self._read_page()
        finally:
            self._reading = False

    async def _sleep(self) -> None:
        """Wait to be woken. A durable subscription wakes periodically to advance its position."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        again = loop.call_later(IDLE_S, self._wake) if self._durable is not None else None
        try:
            self._note_idle()
            await self._waiter
        finally:
            self._waiter = None
            if again is not None:
                again.cancel()

    def _note_idle(self) -> None:
        """Advance past events of other keys, because nothing is left to hand over.

        Otherwise a durable subscription to rare keys would block retention forever.
        """
        if self._live:
            self._position = max(self._position, self._dispatcher.delivered)
        if self._durable is not None:
            self._handed = max(self._handed, self._position)
            self._durable.handled(self._handed)

    async def _read_page(self) -> None:
        log = self._reader.required("reading from the log")
        # A page waits in memory too, so a small queue reads small pages.
        limit = min(PAGE_EVENTS, max(PAGE_EVENTS_MIN, self.queue_events))
        try:
            page = await self._reader.run(log.read, self._keys, Span(0 if self._from_oldest else self._position), limit)
            if page.low_water > self._position and not self._from_oldest:  # at position 0, where reading raises nothing
                raise LogTrimmed(self._position, page.low_water)
        except LogTrimmed as trimmed:
            self._pass_trimmed(trimmed)
            return
        self._from_oldest = False
        events, error, skipped = page.events(self._reader.skip_corrupt)
        self._dispatcher.count("corrupt_skipped", skipped)
        self._queue.extend([event._with(self._handle) for event in events] if self._bound else events)
        self._dispatcher.deliveries += len(events)
        if error is not None:
            self._position = events[-1].offset if events else self._position
            self._failed = error
        elif page.covered > self._position:
            self._position = page.covered
        else:
            await asyncio.sleep(STALE_S)  # the log does not show yet what was delivered

    def _pass_trimmed(self, trimmed: LogTrimmed) -> None:
        """Continue with the oldest event that is left, and notify the subscriber of what it missed."""
        log = self._reader.required("reading from the log")
        missed = log.count(self._position, trimmed.low_water)
        self._failed = LogTrimmed(self._position, trimmed.low_water, missed)
        self._position = self._handed = trimmed.low_water
        report_retention_gap(self._host, self.key_exprs, self.durable, self._failed)

    def _join_live(self) -> bool:
        """Receive live events again, if the events in between are in memory and fit into the queue."""
        if self._reader.read_only or self._closed:
            return False
        between = self._dispatcher.recent_after(self._position, self.queue_events, self._keys)
        if between is None:
            return False
        self._live, self._from_oldest = True, False
        if between:
            self._dispatcher.deliveries += self._offer(between)
        self._policy.joined()
        self._checks_changed()
        if self._aside is not None:
            aside, self._aside = self._aside, None
            self._offer(aside.drain(), received=True)
        return True

    async def _resolve(self) -> None:
        """Find the start: an offset, a time, or the stored position of the durable subscription."""
        if self._resolved:
            return
        log = self._reader.required("a start in the past, or a durable subscription,")
        after = self._position
        if self._start == "beginning":
            after = 0
        elif isinstance(self._start, datetime):
            after = await self._before(to_ns(self._start))
        elif isinstance(self._start, int):
            after = log.before(self._start)
        elif isinstance(self._after, datetime):
            after = await self._before(to_ns(self._after) + 1)
        elif self._after is not None:
            after = self._after
        self._from_oldest = after == 0 and (self._start != "new" or self._after is not None)
        if self._durable is not None:
            if self._from_oldest:  # if retention removes more before the first acknowledgement, that is a gap
                after = await self._reader.run(log.low_water)
            after = await self._durable.claim(after)
            self._from_oldest = self._from_oldest and self._durable.is_new
        self._position = self._handed = after
        self._resolved = True

    async def _before(self, time_ns: int) -> int:
        """Return the offset before the first event that was published at `time_ns` or later."""
        span: Span = await self._reader.run(self._reader.required("a start in the past").narrow, Span(from_ns=time_ns))
        return span.after

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Overflow.

    def _overflow(self, events: Sequence[Event], received: bool) -> int:
        """Pass events that fill the queue to the policy. The events that it does not take are read from the log."""
        taken = self._policy.overflow(events, received)
        self._checks_changed()
        if taken:
            self._position = events[taken - 1].offset or self._position
        if taken < len(events):
            self._live = False
            self._dispatcher.count("spilled", 1)
            fields: dict[str, Any] = {"keys": self.key_exprs, "queue_events": self.queue_events}
            reason = "a subscription's queue is full; it continues from the log"
            with self._host.runtime.running():
                record_reason(EVENT_SUBSCRIBER_SLOW, logging.DEBUG, code="spilled", reason=reason, **fields)
        return taken

    def _set_aside(self, events: Sequence[Event]) -> int:
        """Keep events that no log has until this subscription has read the log. Other events are read from there."""
        if events[0].offset or self._closed or self._reader.read_only:
            return 0
        if self._bound:
            events = [event._with(self._handle) for event in events]
        if self._aside is None:
            self._aside = Backlog(BACKLOG_BYTES_MAX)
        kept = self._aside.fill(events)
        self._dispatcher.count("backlogged", kept)
        if kept < len(events):
            self._policy.drop(events[kept:], BACKLOG_FULL)
        return len(events)

    def _lagged(self) -> SubscriberLagged:
        gap = self._buffer.take_gap()
        span: dict[str, Any] = {"missed": gap.missed, "after": self._handed, "until": gap.until}
        self._handed = max(self._handed, gap.until)  # a later gap begins after this one
        reason = "a subscription did not keep up with its events and missed some"
        fields = {"keys": self.key_exprs, **span}
        with self._host.runtime.running():
            record_reason(EVENT_SUBSCRIBER_SLOW, logging.WARNING, code="lagged", reason=reason, **fields)
        return SubscriberLagged(self.key_exprs, queue_events=self.queue_events, **span)


def check_schema(schema: object) -> None:
    """Raise `ConfigInvalid` if `schema` is a value and not a type: every payload would be rejected."""
    if isinstance(schema, (str, bytes, int, float, dict, list, tuple, set)):
        reason = f"must be the type that payloads decode to, such as dict or a pydantic model, not {schema!r:.80}"
        raise ConfigInvalid("schema", reason)


def check_options(
    has_log: bool,
    start: Start,
    after: int | datetime | None,
    durable: str | None,
    queue_events: int,
    overflow: str | None,
) -> Overflow:
    """Raise `ConfigInvalid` for options that contradict each other; return the overflow policy."""
    name = overflow or ("spill" if durable is not None else "drop_oldest")
    if name not in POLICIES:
        *names, last = POLICIES
        raise ConfigInvalid("overflow", f"{name!r} must be {', '.join(names)} or {last}")
    policy = POLICIES[name]  # type: ignore[index]  # it is one of them
    if durable is not None and policy.drops:
        raise ConfigInvalid("overflow", "a durable subscription never drops: use 'spill' or 'block'")
    if not isinstance(queue_events, int) or queue_events < 1:
        raise ConfigInvalid("queue_events", "must be a whole number, at least 1")
    if not has_log and (durable is not None or policy.needs_log):
        raise LogRequired("a durable subscription" if durable is not None else f"overflow={name!r}")
    if (start != "new" or after is not None) and not has_log:
        raise LogRequired("a start in the past")
    if isinstance(start, bool) or not (start in ("new", "beginning") or isinstance(start, (int, datetime))):
        raise ConfigInvalid("start", f"{start!r} must be 'new', 'beginning', an offset or a datetime")
    if not isinstance(start, str):
        check_offset_or_time("start", start)
    if after is not None and start != "new":
        raise ConfigInvalid("after", "give either `start` (that event included) or `after` (excluded), not both")
    check_offset_or_time("after", after)
    if durable is not None and (not isinstance(durable, str) or not durable):
        raise ConfigInvalid("durable", f"{durable!r} must be the name of the durable subscription")
    return name  # type: ignore[return-value]
