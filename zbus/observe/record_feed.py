"""Records on the bus itself: each is an event on `@zbus/record/<NAME>`, a key that no `**` matches.

Whoever subscribes to `@zbus/record/*`, on this node or another, sees what the buses of this process do. Such events
are not stored, and a flood of them is bounded: what does not fit is counted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from time import time_ns
from typing import Any

from zbus.event import Event
from zbus.headers import CONTENT_TYPE, CORRELATION_ID, JSON

from .formatters import as_json
from .records import RECORDS, listen

WAITING_MAX = 1000


class RecordFeed:
    """Lives on the loop; records come from any thread."""

    def __init__(self, level: int, send: Callable[[Sequence[Event]], None], count: Callable[[str, int], None]) -> None:
        self._send, self._count = send, count
        self._loop = asyncio.get_running_loop()
        self._identities: dict[str, tuple[int, int]] = {}  # of each name one: who wants some of them misses none
        self._waiting: deque[dict[str, Any]] = deque()
        self._armed = False
        self._left_out = 0
        self.close: Callable[[], None] = listen(level, self._hear)

    def _hear(self, level: int, fields: dict[str, Any]) -> None:
        """On any thread."""
        keys = fields.get("keys") or ()
        if keys and all(str(key).startswith("@zbus/") for key in keys):
            return  # a reader of records that falls behind would make more of them
        if len(self._waiting) >= WAITING_MAX:
            self._left_out += 1
            return
        self._waiting.append(fields)
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._publish)
            except RuntimeError:
                pass  # the loop is closed, and with it the bus

    def _publish(self) -> None:
        self._armed = False  # before draining, so that nothing is left unseen
        left_out, self._left_out = self._left_out, 0
        self._count("dropped_records", left_out)
        events: list[Event] = []
        while self._waiting:
            fields = self._waiting.popleft()
            headers = {CONTENT_TYPE: JSON, CORRELATION_ID: str(fields["correlation_id"])}
            key = RECORDS + fields["record"]
            publisher_id, sequence = self._identities.get(key) or (secrets.randbits(53), 0)
            self._identities[key] = publisher_id, sequence + 1
            events.append(Event(publisher_id, sequence, time_ns(), key, as_json(fields), headers))
        if events:
            self._send(events)
