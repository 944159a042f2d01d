"""The send queue: hands committed events to one fabric, from memory while it keeps up, otherwise from the log.

Live sending and recovery are the same code: the queue sends the events after the position that it has reached, and
receivers identify events by publisher and sequence. Each event names the event before it on its key, and beacons name
the position of the queue, so that receivers notice a gap and request the missing events.

The queue has no thread of its own: a driver calls `step`, which never sleeps. All other methods may be called on any
thread and do not block.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from zbus.errors import LogError, LogTrimmed, ZbusError
from zbus.keys import KeySet
from zbus.observe.records import EVENT_DROPPED, EVENT_RETRY, record_reason
from zbus.ports.fabric import Fabric
from zbus.ports.lineage import NO_BRANCH
from zbus.ports.log import Log, Row, Span, row_of
from zbus.util.backoff import Backoff
from zbus.util.runtime import Runtime
from zbus.wire.beacon import ENTRIES_MAX, Beacon, Newest, beacon_key, encode_beacon
from zbus.wire.frames import Framing, Sendable
from zbus.wire.provenance import Forward

BACKLOG_EVENTS_MAX = 65_536
CONGESTED_EVENTS = 16_384  # without a log, publishers wait above this, as long as the fabric accepts events
PAGE_EVENTS = ENTRIES_MAX // 2  # sent at once: with half a beacon's entries pending, all its keys still fit into one
BEACON_S = 1.0  # the interval of beacons
QUIET_S = 0.05  # a beacon is due this long after the last event, if that is earlier
GRACE_S = 2.0  # without a log, how long the first events wait for a subscriber
POLL_S = 0.005  # between two looks at something that does not wake the queue
RETRY_FIRST_S, RETRY_MAX_S = 0.05, 2.0
ANNOUNCEMENTS_MAX = 4096
NOW = -math.inf


class SendQueue:
    """The events that wait for one fabric, and the position that was reached.

    Without a log, every event that was offered is counted once: as sent (`sent_events`), as dropped
    (`dropped_send_queue_full`) or as waiting, even while it is being sent. Events of other nodes that a bridge does
    not forward are the exception: they are only removed.
    """

    def __init__(
        self,
        fabric: Fabric,
        origin: int,
        log: Log | None,
        start: int,
        offered_after: int,
        count: Callable[[str, int], None],
        on_capacity: Callable[[], None],
        forward: Forward | None,
        runtime: Runtime,
    ) -> None:
        """Start to send the events after position `start`. Every event after `offered_after` will be offered.

        `count` and `on_capacity` may be called on the driver's thread. `on_capacity` means that the queue is no longer
        congested.
        """
        self._fabric, self._origin, self._log, self._count, self._on_capacity = fabric, origin, log, count, on_capacity
        self._monotonic, self._time_ns, self._running = runtime.monotonic, runtime.time_ns, runtime.running
        self._lock = threading.Lock()
        # Guarded by the lock, because other threads write or read them.
        self._backlog: deque[tuple[Sequence[Row], Sequence[int]]] = deque()
        self._queued_events = 0  # in the backlog
        self._in_flight_events = 0  # taken from the backlog, and not sent yet
        self._announcements: list[tuple[str, bytes]] = []
        self._log_until = offered_after if log is not None else 0  # what is not sent up to here is only in the log
        self._failing = False
        self._was_congested = False
        self._ended = False
        self._on_end: Callable[[], None] | None = None
        self.sent_events = 0
        # Written only by `step`.
        self.sent = start  # everything up to this position was handed to the fabric
        self.forwarded = self.forwarded_lag_ns = 0  # events of other nodes that were sent; the age of the last one then
        self._framing = Framing(origin, start, forward)
        self._newest: dict[str, Newest] = {}  # since the last beacon
        self._since = start
        self._beacon_at = self._sent_at = -math.inf
        self._awaits_subscriber = log is None
        self._grace_until = math.inf  # set by the first event
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S, uniform=runtime.uniform)
        self._retry_at = self._read_at = NOW
        self._driver = runtime.driver(self.step, "zbus-send-queue", _record_retry)

    def offer(self, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        """Queue events that were committed (without a log: published), with their offsets."""
        if not rows:
            return
        lost = 0
        with self._lock:
            if self._queued_events + self._in_flight_events + len(rows) > BACKLOG_EVENTS_MAX:
                lost = self._clear_backlog()
            self._backlog.append((rows, offsets))
            self._queued_events += len(rows)
        self._driver.wake()
        if lost:
            reason = "the transport is too slow or disconnected, and the node has no log"
            with self._running():
                record_reason(EVENT_DROPPED, logging.WARNING, code="send_queue_full", reason=reason, events=lost)

    def announce(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Queue frames that are not events of the log, after the events. They are sent once, or dropped."""
        with self._lock:
            if len(self._announcements) + len(frames) > ANNOUNCEMENTS_MAX:
                self._count("dropped_announcements", len(frames))
                return
            self._announcements += frames
        self._driver.wake()

    @property
    def waiting(self) -> int:
        """The number of events that wait in memory, including those that are being sent."""
        with self._lock:
            return self._queued_events + self._in_flight_events

    @property
    def has_sent(self) -> bool:
        """Whether an event was sent since the start."""
        return self.sent_events > 0

    @property
    def congested(self) -> bool:
        """Whether publishers should wait: only this queue has their events, and the fabric is slow but connected."""
        with self._lock:
            waiting = self._queued_events + self._in_flight_events
            congested = self._log is None and waiting > CONGESTED_EVENTS and not self._failing
            self._was_congested = self._was_congested or congested
            return congested

    def close(self, timeout_s: float) -> None:
        """Send the remaining events, for at most `timeout_s`. With a log, the rest is sent after the next start."""
        self.end()
        self._driver.join(timeout_s)
        self._report_unsent()  # if the fabric still blocks the driver

    def _report_unsent(self) -> None:
        """Count the events that are not sent at the end, unless the log has them."""
        if self._log is not None:
            return
        with self._lock:
            lost = self._queued_events + self._in_flight_events
            self._backlog.clear()
            self._queued_events = self._in_flight_events = 0
        if lost:
            self._count("dropped_at_close", lost)
            reason = "the transport was closed before these events were sent, and the node has no log"
            record_reason(EVENT_DROPPED, logging.WARNING, code="closed_before_sent", reason=reason, events=lost)

    def end(self, on_end: Callable[[], None] | None = None) -> None:
        """Send the remaining events and then stop. Does not block; `on_end` is called on the driver's thread."""
        with self._lock:
            self._on_end, self._ended = on_end, True
        self._driver.wake()

    def step(self) -> float | None:
        """Send what is due. Return the monotonic time of the next step, or None at the end. Only the driver calls it.

        An error of the fabric or of the log is logged, and the same is sent again after a pause.
        """
        due = self._step()
        if due is None:
            self._report_unsent()
            if self._on_end is not None:
                self._on_end()
        return due

    def _step(self) -> float | None:
        now = self._monotonic()
        if now < self._retry_at:
            return None if self._ended else self._retry_at
        try:
            if self._awaits_subscriber and not self._found_subscriber(now):
                return math.inf if self._grace_until == math.inf else now + POLL_S
            due = self._next_due()
            if due is None or due > now:
                return due
            self._send_due()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of a Rust library is not an `Exception`
            return self._retry_later(error)
        self._retry_at = NOW
        self._backoff.reset()
        self._notify_capacity(failing=False)
        return self._next_due()

    def _next_due(self) -> float | None:
        with self._lock:
            if self._is_behind():
                return self._read_at
            if self._backlog or self._announcements:
                return NOW
            if self._ended:
                return NOW if self._newest else None  # a last beacon names the position reached
        return self._beacon_due()

    def _send_due(self) -> None:
        if len(self._newest) >= ENTRIES_MAX // 2:
            self._send_beacon()  # the keys of another page might not fit into it
        with self._lock:
            behind = self._is_behind()
        if behind:
            self._send_page()
        else:
            self._send_backlog()
        self._send_announcements()
        if self._monotonic() >= self._beacon_due():
            self._send_beacon()

    def _retry_later(self, error: BaseException) -> float | None:
        pause_s = self._backoff.next()
        self._retry_at = self._monotonic() + pause_s
        self._read_at = NOW
        self._notify_capacity(failing=True)
        _record_retry(error, pause_s)
        return None if self._ended else self._retry_at

    def _notify_capacity(self, failing: bool) -> None:
        """Let publishers continue: there is capacity again, or they would wait for a disconnected fabric."""
        with self._lock:
            self._failing = failing
            waiting = self._queued_events + self._in_flight_events
            notify = self._was_congested and (failing or waiting < CONGESTED_EVENTS // 2)
            if notify:
                self._was_congested = False
        if notify:
            self._on_capacity()

    # Events.

    def _clear_backlog(self) -> int:
        """Remove the queued events. Return how many are lost. Events in flight are not touched."""
        cleared, self._queued_events = self._queued_events, 0
        if self._log is not None:
            if self._backlog:
                self._log_until = self._backlog[-1][1][-1]
            self._backlog.clear()
            return 0
        self._backlog.clear()
        self._count("dropped_send_queue_full", cleared)
        return cleared

    def _send_backlog(self) -> None:
        with self._lock:
            taken = self._take_batches()
            events = sum(len(rows) for rows, _ in taken)
            self._queued_events -= events
            self._in_flight_events = events
        if not taken:
            return
        try:
            self._send([pair for rows, offsets in taken for pair in zip(rows, offsets, strict=True)])
        except BaseException:
            with self._lock:
                self._in_flight_events = 0
                if self._log is not None:
                    self._log_until = max(self._log_until, taken[-1][1][-1])
                else:  # no other copy exists
                    self._backlog.extendleft(reversed(taken))
                    self._queued_events += events
            raise

    def _take_batches(self) -> list[tuple[Sequence[Row], Sequence[int]]]:
        """Take at most a page of events from the head of the backlog, splitting a batch that is larger."""
        taken: list[tuple[Sequence[Row], Sequence[int]]] = []
        events = 0
        while self._backlog and events + len(self._backlog[0][0]) <= PAGE_EVENTS:
            taken.append(self._backlog.popleft())
            events += len(taken[-1][0])
        if self._backlog and not taken:
            rows, offsets = self._backlog.popleft()
            taken.append((rows[:PAGE_EVENTS], offsets[:PAGE_EVENTS]))
            self._backlog.appendleft((rows[PAGE_EVENTS:], offsets[PAGE_EVENTS:]))
        return taken

    def _is_behind(self) -> bool:
        """Return whether events that come before the backlog must be read from the log. Under the lock."""
        return self.sent < self._log_until

    def _send_page(self) -> None:
        """Send the next page of the log."""
        assert self._log is not None
        before = self.sent
        try:
            page = self._log.read(_ALL_KEYS, Span(before), PAGE_EVENTS)
        except LogTrimmed as trimmed:
            self._skip_to(self._log, trimmed.low_water)
            return
        events, error, skipped = page.events(skip_corrupt=True)
        if error is not None:
            raise error
        self._send([(row_of(event), event.offset) for event in events])
        self._count("corrupt_skipped", skipped)
        self.sent = max(self.sent, page.covered)
        # A page that leads no further is stale: the log does not show yet what is stored.
        self._read_at = NOW if self.sent > before else self._monotonic() + POLL_S

    def _skip_to(self, log: Log, low_water: int) -> None:
        """Continue after events that retention removed before they were sent. Receivers see the gap."""
        removed = log.count(self.sent, low_water)
        self._count("dropped_by_retention", removed)
        reason = "retention removed events before they were sent"
        span = {"after": self.sent, "until": low_water}
        record_reason(EVENT_DROPPED, logging.WARNING, code="retention", reason=reason, events=removed, **span)
        self.sent = low_water
        self._framing.restart(low_water)

    def _send(self, rows: Sequence[Sendable]) -> None:
        """Send rows in order, each with its offset."""
        if rows and rows[0][1] <= self.sent:  # already sent from the log
            rows = [pair for pair in rows if pair[1] > self.sent]
        if self._log is not None:
            self._framing.branch = self._log.lineage.branch
        made = self._framing.make(rows)
        if made.frames:
            self._fabric.send(made.frames)
            self._newest.update(made.newest)
            self._sent_at = self._monotonic()
        with self._lock:
            self.sent_events += made.events
            self._in_flight_events = 0
        if made.forwarded:
            self.forwarded += made.forwarded
            self.forwarded_lag_ns = max(0, self._time_ns() - made.forwarded_at)
        if rows:
            self.sent = max(self.sent, rows[-1][1])
        self._framing.sent(made, self.sent)

    # Everything else.

    def _send_announcements(self) -> None:
        with self._lock:
            frames, self._announcements = self._announcements, []
        if frames and not self._fabric.events_only:
            try:
                self._fabric.send(frames)
            except BaseException:
                self._count("dropped_announcements", len(frames))
                raise

    def _beacon_due(self) -> float:
        if self._ended:
            return NOW
        due = self._beacon_at + BEACON_S
        return min(due, self._sent_at + QUIET_S) if self._newest else due

    def _send_beacon(self) -> None:
        if not self._fabric.events_only:
            branch, digest = NO_BRANCH, b""
            if self._log is not None:
                branch = self._log.lineage.branch
                with suppress(LogError):  # the beacon is sent without it
                    digest = self._log.digest(self.sent)
            beacon = Beacon(self._origin, self._since, self.sent, dict(self._newest), branch, digest)
            self._fabric.send([(beacon_key(self._origin), encode_beacon(beacon))])
        self._newest.clear()
        self._since, self._beacon_at = self.sent, self._monotonic()

    def _found_subscriber(self, now: float) -> bool:
        """Return whether to start sending events.

        Links and declarations of other nodes take a moment after a start. Without a log, an event that is sent before
        the first subscriber is connected would be lost.
        """
        with self._lock:
            key = self._backlog[0][0][0].key if self._backlog else None
        if self._ended:
            self._awaits_subscriber = False
        elif key is None:
            with suppress(ZbusError):  # not connected yet: a node announces itself again
                self._send_announcements()
        else:
            self._grace_until = min(self._grace_until, now + GRACE_S)
            self._awaits_subscriber = now < self._grace_until and not self._fabric.ready(key)
        return not self._awaits_subscriber


def _record_retry(error: BaseException, pause_s: float | None) -> None:
    unexpected = None if isinstance(error, ZbusError) else error
    again_in_s = None if pause_s is None else round(pause_s, 3)
    reason = str(error) or type(error).__name__
    record_reason(EVENT_RETRY, logging.WARNING, unexpected, code="send_failed", reason=reason, again_in_s=again_in_s)


_ALL_KEYS = KeySet.all()
