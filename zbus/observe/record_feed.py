"""Records on the bus itself: each is an event on `@zbus/record/<NAME>`, a key that no `**` matches.

A subscriber of `@zbus/record/*`, on this node or another, sees what the buses of this process do. Such events are not
stored, and a flood of them is bounded: records that do not fit are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from zbus.event import Event
from zbus.headers import CONTENT_TYPE, CORRELATION_ID, JSON
from zbus.util.identities import Identities
from zbus.util.mailbox import Mailbox
from zbus.util.runtime import Runtime

from .formatters import as_json
from .records import RECORDS, listen

WAITING_MAX = 1000
NAMES_MAX = 1000


class RecordFeed:
    """Lives on the loop; records come from any thread."""

    def __init__(
        self,
        level: int,
        send: Callable[[Sequence[Event]], None],
        count: Callable[[str, int], None],
        runtime: Runtime,
    ) -> None:
        self._send, self._count, self._time_ns = send, count, runtime.time_ns
        # One publisher for each name, so that a subscriber of some names sees their sequences without gaps.
        self._identities = Identities[str](NAMES_MAX, runtime.randbits)
        self._mailbox = Mailbox[dict[str, Any]](asyncio.get_running_loop(), self._publish, WAITING_MAX)
        self.close: Callable[[], None] = listen(level, self._hear)

    def _hear(self, level: int, fields: dict[str, Any]) -> None:
        """On any thread."""
        keys = fields.get("keys") or ()
        if keys and all(str(key).startswith("@zbus/") for key in keys):
            return  # a subscriber of records that falls behind would cause more of them
        self._mailbox.post(fields)

    def _publish(self, records: list[dict[str, Any]]) -> None:
        self._count("dropped_records", self._mailbox.take_overflowed())
        self._send([self._event(fields) for fields in records])

    def _event(self, fields: dict[str, Any]) -> Event:
        key = RECORDS + fields["record"]
        headers = {CONTENT_TYPE: JSON, CORRELATION_ID: str(fields["correlation_id"])}
        return Event(*self._identities.next(key), self._time_ns(), key, as_json(fields), headers)
