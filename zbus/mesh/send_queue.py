"""The outbox: what was committed goes to one fabric, from memory while it keeps up, else from the log.

Live sending and recovery are the same code: what follows the position reached is sent, and receivers
know each event by its identity. Each event says which one came before it on its key, and beacons say
how far the outbox is, so that receivers notice what they missed and ask for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from zbus.errors import LogTrimmed, ZbusError
from zbus.event import Event
from zbus.keys import KeySet
from zbus.observe.records import EVENT_DROPPED, EVENT_RETRY, record
from zbus.ports.fabric import Fabric
from zbus.ports.log import Log, Row, Span
from zbus.wire.beacon import ENTRIES_MAX, Beacon, Newest, beacon_key, encode_beacon
from zbus.wire.frames import Framing, Sendable
from zbus.wire.provenance import Forward

BACKLOG_EVENTS_MAX = 65_536
CROWDED_EVENTS = 16_384  # without a log, publishers wait from here on, as long as the fabric takes anything
PAGE_EVENTS = 2048
BEACON_S = 1.0  # how often while idle, and the longest while busy
QUIET_S = 0.05  # how soon after the last event
GRACE_S = 2.0  # without a log, how long the first events wait for somebody who wants them
RETRY_S = (0.05, 2.0)
SAID_MAX = 4096


class Outbox:
    """One thread that encodes and sends. The loop only appends to its backlog and wakes it."""

    def __init__(
        self,
        fabric: Fabric,
        origin: int,
        log: Log | None,
        start: int,
        count: Callable[[str, int], None],
        room: Callable[[], None],
        forward: Forward | None = None,
    ) -> None:
        """`room` is called, on the outbox's thread, when it is crowded no longer."""
        self._fabric, self._origin, self._log, self._count = fabric, origin, log, count
        self._room, self._failing, self._was_crowded = room, False, False
        self._backlog: deque[tuple[Sequence[Row], Sequence[int]]] = deque()
        self._backlog_events = 0
        self._said: list[tuple[str, bytes]] = []  # what has no place in the log: of this node, and records
        self._wake = threading.Condition()
        self._ended = False
        self.sent = start  # everything up to here was handed to the fabric
        self.sent_events = 0
        self.crossed = self.crossed_lag_ns = 0  # events of other nodes that were; how old the last of them was then
        self._behind = log is not None  # until the log has nothing after `start`
        self._framing = Framing(origin, start, forward)
        self._newest: dict[str, Newest] = {}  # since the last beacon
        self._since = start
        self._beacon_at = self._sent_at = 0.0
        self._thread = threading.Thread(target=self._run, name="zbus-outbox", daemon=True)
        self._thread.start()

    def offer(self, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        """Take what was committed (or, without a log, published). Never waits."""
        with self._wake:
            if self._backlog_events + len(rows) > BACKLOG_EVENTS_MAX:
                self._overflow()
            self._backlog.append((rows, offsets))
            self._backlog_events += len(rows)
            self._wake.notify()

    def say(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Send frames that are no events of the log, after what waits; once, and not at all while there is no link."""
        with self._wake:
            if len(self._said) + len(frames) > SAID_MAX:
                self._count("dropped_said", len(frames))
                return
            self._said += frames
            self._wake.notify()

    @property
    def waiting(self) -> int:
        """How many events wait in memory."""
        return self._backlog_events

    @property
    def has_sent(self) -> bool:
        """Whether anything was sent since the start."""
        return self._sent_at > 0

    @property
    def crowded(self) -> bool:
        """Whether publishers should wait: nothing else keeps what they publish, and the fabric is slow but there."""
        crowded = self._log is None and self._backlog_events > CROWDED_EVENTS and not self._failing
        self._was_crowded = self._was_crowded or crowded
        return crowded

    def close(self, timeout_s: float) -> None:
        """Send what is left for as long as there is time; with a log, the rest goes at the next start."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _overflow(self) -> None:
        lost = self._backlog_events
        self._backlog.clear()
        self._backlog_events = 0
        if self._log is not None:
            self._behind = True  # the log has them
        else:
            self._count("dropped_outbox_full", lost)
            reason = "the fabric is too slow or away, and there is no log"
            record(EVENT_DROPPED, logging.WARNING, reason=reason, events=lost)

    def _run(self) -> None:
        if self._log is None:
            self._await_somebody()
        pause = RETRY_S[0]
        while self._await_work():
            try:
                self._send_page() if self._behind else self._send_backlog()
                self._send_said()
                self._send_beacon()
                pause, self._failing = RETRY_S[0], False
                self._tell_room()
            except ZbusError as error:
                self._failing = True
                self._tell_room()
                record(EVENT_RETRY, logging.WARNING, reason=str(error), again_in_s=pause)
                with self._wake:
                    self._behind = self._log is not None
                    again_at = time.monotonic() + pause
                    while not self._ended and (left := again_at - time.monotonic()) > 0:
                        self._wake.wait(left)  # each event that is offered meanwhile wakes it too
                    if self._ended:
                        return
                pause = min(RETRY_S[1], pause * 2)

    def _tell_room(self) -> None:
        if self._was_crowded and (self._failing or self._backlog_events < CROWDED_EVENTS // 2):
            self._was_crowded = False
            self._room()

    def _await_work(self) -> bool:
        """Wait for events, or until a beacon is due; False at the end."""
        with self._wake:
            while not self._backlog and not self._behind and not self._said:
                if self._ended:
                    return bool(self._newest)  # one more beacon tells how far it went
                if not self._wake.wait(self._beacon_due() - time.monotonic()):
                    return True
            return True

    def _send_backlog(self) -> None:
        with self._wake:
            if not self._backlog:
                return
            taken = [self._backlog.popleft()]
            events = len(taken[0][0])
            while self._backlog and events + len(self._backlog[0][0]) <= PAGE_EVENTS:
                taken.append(self._backlog.popleft())
                events += len(taken[-1][0])
        try:
            self._send([pair for rows, offsets in taken for pair in zip(rows, offsets, strict=True)])
        except ZbusError:
            if self._log is None:  # nothing else has them
                with self._wake:
                    self._backlog.extendleft(reversed(taken))
            else:
                with self._wake:
                    self._backlog_events -= events
            raise
        with self._wake:
            self._backlog_events = max(0, self._backlog_events - events)

    def _send_said(self) -> None:
        with self._wake:
            said, self._said = self._said, []
        if said and not self._fabric.events_only:
            self._fabric.send(said)

    def _send_page(self) -> None:
        """Catch up from the log; the backlog takes over again where it continues without a hole."""
        assert self._log is not None
        with self._wake:
            if self._backlog and self._backlog[0][1][0] <= self.sent + 1:
                self._behind = False
                return
        try:
            page = self._log.read(_EVERYTHING, Span(self.sent), PAGE_EVENTS)
        except LogTrimmed as trimmed:
            self._skip_to(trimmed.low_water)
            return
        events, error, skipped = page.events(skip_corrupt=True)
        if error is not None:
            raise error
        self._count("corrupt_skipped", skipped)
        self._send([_sendable(event) for event in events])
        self.sent = max(self.sent, page.covered)
        if not events:
            with self._wake:
                self._behind = False

    def _skip_to(self, low_water: int) -> None:
        """Retention removed what was not sent yet: say so, and let receivers see the hole."""
        self._count("dropped_by_retention", low_water - self.sent)
        reason = "retention removed events before they were sent"
        record(EVENT_DROPPED, logging.WARNING, reason=reason, first=self.sent + 1, last=low_water)
        self.sent = low_water
        self._framing.restart(low_water)

    def _send(self, rows: Sequence[Sendable]) -> None:
        """Send rows in order, each with its offset."""
        if rows and rows[0][1] <= self.sent:  # the log was faster
            rows = [pair for pair in rows if pair[1] > self.sent]
        made = self._framing.make(rows)
        if made.frames:
            self._fabric.send(made.frames)
            self._newest.update(made.newest)
            self.sent_events += made.events
            self._sent_at = time.monotonic()
        if made.crossed:
            self.crossed += made.crossed
            self.crossed_lag_ns = max(0, time.time_ns() - made.crossed_at)
        if rows:
            self.sent = max(self.sent, rows[-1][1])
        self._framing.sent(made, self.sent)

    def _beacon_due(self) -> float:
        """When to say how far it is: now and then, soon after the last event, and when there is much to say."""
        if self._ended or len(self._newest) >= ENTRIES_MAX // 2:
            return 0.0
        due = self._beacon_at + BEACON_S
        return min(due, self._sent_at + QUIET_S) if self._newest else due

    def _send_beacon(self) -> None:
        now = time.monotonic()
        if now < self._beacon_due():
            return
        if not self._fabric.events_only:
            beacon = Beacon(self._origin, self._since, self.sent, dict(self._newest))
            self._fabric.send([(beacon_key(self._origin), encode_beacon(beacon))])
        self._newest.clear()
        self._since, self._beacon_at = self.sent, now

    def _await_somebody(self) -> None:
        """Links and declarations of other nodes take a moment after a start, and what is sent to nobody is gone."""
        while True:
            with self._wake:
                while not (self._backlog or self._said or self._ended):
                    self._wake.wait()
                if self._ended:
                    return
                if self._backlog:
                    key = self._backlog[0][0][0][3]
                    break
            with suppress(ZbusError):  # no link yet: a node tells of itself again and again
                self._send_said()
        deadline = time.monotonic() + GRACE_S
        while not self._ended and time.monotonic() < deadline and not self._fabric.ready(key):
            time.sleep(0.005)


def _sendable(event: Event) -> Sendable:
    headers = event.headers if isinstance(event.headers, dict) else dict(event.headers)
    return (event.publisher_id, event.sequence, event.published_at, event.key, event.payload, headers), event.offset


_EVERYTHING = KeySet.all()
