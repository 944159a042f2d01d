"""Per-burst log records for published and received events: count, keys and correlation ids."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import count, islice
from typing import Any

from zbus.event import Event
from zbus.headers import CORRELATION_ID, decode_headers
from zbus.ports.log import Row
from zbus.util.run_id import run_id
from zbus.util.runtime import Runtime

from .records import EVENT_PUBLISHED, EVENT_RECEIVED, record

NAMED_MAX = 8  # keys and correlation ids in one record
_MARK = CORRELATION_ID.encode()


class BurstRecords:
    """Writes the records of one node. Its methods are called only if `wanted(DEBUG)`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._bursts = count(1)  # a counter, because random bytes would need a system call per burst

    def published(self, rows: Sequence[Row], offsets: Sequence[int] | None = None) -> None:
        """Record that events were stored or, without a log, handed on."""
        offset_range: dict[str, Any] = {"first": offsets[0], "last": offsets[-1]} if offsets else {}
        # Headers are decoded only if the name of the header occurs in them.
        headers = [decode_headers(row.headers) for row in rows if row.headers is not None and _MARK in row.headers]
        own_id = f"{rows[0].publisher_id:x}-{rows[0].sequence}" if len(rows) == 1 else None
        named = self._named(dict.fromkeys([row.key for row in rows]), headers, len(rows), own_id)
        record(EVENT_PUBLISHED, logging.DEBUG, events=len(rows), **offset_range, **named)

    def received(self, deliveries: Sequence[Sequence[Event]]) -> None:
        """Record that events were put into subscription queues; an event counts once per queue."""
        number, first = sum([len(events) for events in deliveries]), deliveries[0][0]
        headers = [event.headers for events in deliveries for event in events if event.headers]
        keys = dict.fromkeys([event.key for events in deliveries for event in events])
        one = all(len(events) == 1 and events[0] is first for events in deliveries)
        named = self._named(keys, headers, number, first.correlation if one else None)
        record(EVENT_RECEIVED, logging.DEBUG, events=number, subscriptions=len(deliveries), **named)

    def _named(
        self, keys: Collection[str], headers: Sequence[Mapping[str, str]], events: int, own_id: str | None
    ) -> dict[str, Any]:
        """Return the keys of a burst, and its correlation id: that of all its events, or `own_id`, or a new one."""
        fields: dict[str, Any] = {"keys": [*islice(keys, NAMED_MAX)], "key_count": len(keys)}
        carried = [found for each in headers if (found := each.get(CORRELATION_ID)) is not None]
        ids = dict.fromkeys(carried)
        if len(ids) == 1 and len(carried) == events:
            return fields | {"correlation_id": carried[0]}
        if ids:
            fields |= {"correlation_ids": list(ids)[:NAMED_MAX], "correlation_id_count": len(ids)}
        with self._runtime.running():
            return fields | {"correlation_id": own_id or f"{run_id.get()}-{next(self._bursts)}"}
