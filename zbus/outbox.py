"""The outbox: what was committed goes to the fabric, from memory while it keeps up, else from the log.

How far it is stands in the log, so a crash between commit and send is made good at the next start:
what follows that position is sent again, and receivers know each event by its identity.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from .codec import encode
from .errors import ZbusError
from .event import Event
from .headers import decode_headers
from .keys import KeySet
from .ports import Fabric, Log, Row, Span
from .records import EVENT_DROPPED, EVENT_RETRY, record

BACKLOG_EVENTS_MAX = 8192
PAGE_EVENTS = 512
GRACE_S = 3.0  # how long a backlog waits at start for somebody who wants it
RETRY_S = (0.05, 5.0)


class Outbox:
    """One thread that encodes and sends. The loop only appends to its backlog and wakes it."""

    def __init__(self, fabric: Fabric, log: Log | None, count: Callable[[str, int], None]) -> None:
        self._fabric, self._log, self._count = fabric, log, count
        self._backlog: deque[tuple[Sequence[Row], Sequence[int]]] = deque()
        self._backlog_events = 0
        self._wake = threading.Condition()
        self._ended = False
        # With a log, `_sent` is the truth, and what the backlog lacks is read from the log.
        self._sent = log.sent if log is not None else 0
        self._behind = log is not None and log.head() > self._sent
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
            record(
                EVENT_DROPPED,
                logging.WARNING,
                reason="the fabric is too slow and there is no log",
                events=lost,
            )

    def _run(self) -> None:
        if self._behind:
            self._await_somebody()
        pause = RETRY_S[0]
        while True:
            with self._wake:
                while not self._backlog and not self._behind and not self._ended:
                    self._wake.wait()
                if self._ended and not self._backlog and not self._behind:
                    return
            try:
                self._send_page() if self._behind else self._send_backlog()
                pause = RETRY_S[0]
            except ZbusError as error:
                record(EVENT_RETRY, logging.WARNING, reason=str(error), again_in_s=pause)
                with self._wake:
                    self._behind = self._log is not None
                    if self._ended:
                        return
                    self._wake.wait(pause)
                pause = min(RETRY_S[1], pause * 2)

    def _send_backlog(self) -> None:
        with self._wake:
            if not self._backlog:
                return
            rows, offsets = self._backlog.popleft()
            self._backlog_events -= len(rows)
        for row, offset in zip(rows, offsets, strict=True):
            if self._log is None or offset > self._sent:
                self._send(Event(*row[:5], decode_headers(row[5]), offset))
        if self._log is not None:
            self._log.sent = self._sent

    def _send_page(self) -> None:
        """Catch up from the log; the backlog takes over again where it continues without a hole."""
        assert self._log is not None
        with self._wake:
            if self._backlog and self._backlog[0][1][0] <= self._sent + 1:
                self._behind = False
                return
        page = self._log.read(_EVERYTHING, Span(self._sent), PAGE_EVENTS)
        events, error, skipped = page.events(skip_corrupt=True)
        if error is not None:
            raise error
        self._count("corrupt_skipped", skipped)
        for event in events:
            self._send(event)
        self._sent = max(self._sent, page.covered)
        self._log.sent = self._sent
        if not events:
            with self._wake:
                self._behind = False

    def _send(self, event: Event) -> None:
        self._fabric.send(event.key, encode(event))
        self._sent = max(self._sent, event.offset)

    def _await_somebody(self) -> None:
        """Links and declarations of other nodes take a moment after a start."""
        assert self._log is not None
        events, _, _ = self._log.read(_EVERYTHING, Span(self._sent), PAGE_EVENTS).events(skip_corrupt=True)
        deadline = time.monotonic() + GRACE_S
        for key in dict.fromkeys(event.key for event in events):
            while not self._ended and time.monotonic() < deadline and not self._fabric.ready(key):
                time.sleep(0.01)


_EVERYTHING = KeySet.all()
