"""What is told of events on their way, once per burst: how many, which, and whose correlation ids they carry."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import count, islice
from typing import Any

from zbus.event import Event
from zbus.headers import CORRELATION_ID, decode_headers
from zbus.ports.log import Row

from .records import EVENT_PUBLISHED, EVENT_RECEIVED, RUN_ID, record

NAMED_MAX = 8  # keys and correlation ids in one record
_MARK = CORRELATION_ID.encode()
_bursts = count(1)  # rather than chance, for which the system would be asked for every burst


def tell_published(rows: Sequence[Row], offsets: Sequence[int] | None = None) -> None:
    """Events were stored, or, where there is no log, handed on. Only to be called if DEBUG is wanted."""
    place: dict[str, Any] = {"first": offsets[0], "last": offsets[-1]} if offsets else {}
    # Headers are decoded only where the name occurs in them.
    headers = [decode_headers(row.headers) for row in rows if row.headers is not None and _MARK in row.headers]
    whose = f"{rows[0].publisher_id:x}-{rows[0].sequence}" if len(rows) == 1 else None
    named = _named(dict.fromkeys([row.key for row in rows]), headers, len(rows), whose)
    record(EVENT_PUBLISHED, logging.DEBUG, events=len(rows), **place, **named)


def tell_received(deliveries: Sequence[Sequence[Event]]) -> None:
    """Events reached the queues of subscriptions here; each counts once for each queue. Likewise."""
    number, first = sum([len(events) for events in deliveries]), deliveries[0][0]
    headers = [event.headers for events in deliveries for event in events if event.headers]
    keys = dict.fromkeys([event.key for events in deliveries for event in events])
    one = all(len(events) == 1 and events[0] is first for events in deliveries)
    named = _named(keys, headers, number, first.correlation if one else None)
    record(EVENT_RECEIVED, logging.DEBUG, events=number, subscriptions=len(deliveries), **named)


def _named(
    keys: Collection[str], headers: Sequence[Mapping[str, str]], events: int, whose: str | None
) -> dict[str, Any]:
    """The keys of a burst, and its id: that which all its events carry, or `whose` if it is one, or one of its own."""
    fields: dict[str, Any] = {"keys": [*islice(keys, NAMED_MAX)], "key_count": len(keys)}
    carried = [found for each in headers if (found := each.get(CORRELATION_ID)) is not None]
    ids = dict.fromkeys(carried)
    if len(ids) == 1 and len(carried) == events:
        return fields | {"correlation_id": carried[0]}
    if ids:
        fields |= {"correlation_ids": list(ids)[:NAMED_MAX], "correlation_id_count": len(ids)}
    return fields | {"correlation_id": whose or f"{RUN_ID}-{next(_bursts)}"}
