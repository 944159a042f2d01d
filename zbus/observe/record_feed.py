"""Log records as events: each is published on `@zbus/record/<NAME>`, a key that `**` does not match.

A subscriber of `@zbus/record/*`, on this node or another one, receives the records of all buses of this process. These
events are not stored. At most `WAITING_MAX` records wait to be published; further ones are dropped and counted.
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
    """Publishes on the event loop; records arrive from any thread."""

    def __init__(
        self,
        level: int,
        send: Callable[[Sequence[Event]], None],
        count: Callable[[str, int], None],
        runtime: Runtime,
    ) -> None:
        self._send, self._count, self._time_ns = send, count, runtime.time_ns
        # One publisher per name, so that a subscriber of some names receives their sequences without gaps.
        self._identities = Identities[str](NAMES_MAX, runtime.randbits)
        self._mailbox = Mailbox[dict[str, Any]](asyncio.get_running_loop(), self._publish, WAITING_MAX)
        self.close: Callable[[], None] = listen(level, self._post)

    def _post(self, level: int, fields: dict[str, Any]) -> None:
        """Queue a record. Called on any thread."""
        keys = fields.get("keys") or ()
        if keys and all(str(key).startswith("@zbus/") for key in keys):
            return  # a subscriber of records that falls behind would otherwise cause more records
        self._mailbox.post(fields)

    def _publish(self, records: list[dict[str, Any]]) -> None:
        self._count("dropped_records", self._mailbox.take_overflowed())
        self._send([self._event(fields) for fields in records])

    def _event(self, fields: dict[str, Any]) -> Event:
        key = RECORDS + fields["record"]
        headers = {CONTENT_TYPE: JSON, CORRELATION_ID: str(fields["correlation_id"])}
        return Event(*self._identities.next(key), self._time_ns(), key, as_json(fields), headers)
