"""The inbox: envelopes from other nodes, off the fabric's threads and onto the loop, once per burst."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from .codec import decode
from .errors import EventInvalid
from .event import Event
from .records import EVENT_DROPPED, EVENT_GAP, EVENT_INVALID, record

INBOX_EVENTS_MAX = 100_000
PUBLISHERS_KEPT_MAX = 100_000
REPORT_S = 60.0


class Inbox:
    """Decodes, leaves out what was seen before, and reports what is missing, by publisher and sequence."""

    def __init__(self, deliver: Callable[[Event], None], count: Callable[[str, int], None]) -> None:
        self._deliver, self._count = deliver, count
        self._loop = asyncio.get_running_loop()
        self._received: deque[bytes] = deque()
        self._armed = False
        self._last: dict[int, int] = {}
        self._reported_at: dict[str, float] = {}
        self._overflowed = 0

    def receive(self, envelope: bytes) -> None:
        """On the fabric's thread: append and wake, nothing else."""
        if len(self._received) >= INBOX_EVENTS_MAX:
            self._overflowed += 1
            return
        self._received.append(envelope)
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                pass  # the loop is closed, and with it the bus

    def _drain(self) -> None:
        self._armed = False
        received = self._received
        for _ in range(len(received)):
            try:
                event = decode(received.popleft())
            except EventInvalid as error:
                self._count("invalid_received", 1)
                self._report(EVENT_INVALID, reason=str(error))
                continue
            if self._is_new(event):
                self._deliver(msgspec.structs.replace(event, offset=0))  # the sender's offset means nothing here
        if self._overflowed:
            lost, self._overflowed = self._overflowed, 0
            self._count("dropped_inbox_full", lost)
            self._report(EVENT_DROPPED, reason="the inbox is full", events=lost)

    def _is_new(self, event: Event) -> bool:
        last = self._last.get(event.publisher_id)
        if last is not None and event.sequence <= last:
            self._count("duplicates_received", 1)
            return False
        if last is not None and event.sequence > last + 1:
            self._count("gaps", 1)
            who, first = event.publisher_id, last + 1
            record(EVENT_GAP, logging.WARNING, publisher_id=who, first=first, last=event.sequence - 1)
        if len(self._last) >= PUBLISHERS_KEPT_MAX:
            self._last.pop(next(iter(self._last)))
        self._last[event.publisher_id] = event.sequence
        return True

    def _report(self, name: str, **fields: Any) -> None:
        """Say it once a minute; the counters have every one."""
        now = time.monotonic()
        if now - self._reported_at.get(name, -REPORT_S) >= REPORT_S:
            self._reported_at[name] = now
            record(name, logging.WARNING, **fields)
