"""What is told of events on their way, once per burst: how many, which, and whose correlation ids they carry."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Sequence
from typing import Any

from .event import Event
from .headers import CORRELATION_ID, decode_headers
from .ports import Row
from .records import EVENT_PUBLISHED, EVENT_RECEIVED, record

NAMED_MAX = 8  # keys and correlation ids in one record
_MARK = CORRELATION_ID.encode()


def tell_published(rows: Sequence[Row], offsets: Sequence[int] | None = None) -> None:
    """Events were stored, or, where there is no log, handed on. Only to be called if DEBUG is wanted."""
    fields: dict[str, Any] = {"events": len(rows), "bytes": sum([len(row[4]) for row in rows])}
    if offsets:
        fields |= {"first": offsets[0], "last": offsets[-1]}
    named = _named([(row[0], row[1], row[3], _correlation_of(row[5])) for row in rows])
    record(EVENT_PUBLISHED, logging.DEBUG, **fields, **named)


def tell_received(deliveries: Collection[Sequence[Event]]) -> None:
    """Events reached the queues of subscriptions here. Likewise."""
    events = {event.identity: event for offered in deliveries for event in offered}
    fields: dict[str, Any] = {"events": len(events), "deliveries": sum([len(offered) for offered in deliveries])}
    named = _named([(*identity, event.key, event.correlation_id) for identity, event in events.items()])
    record(EVENT_RECEIVED, logging.DEBUG, **fields, subscriptions=len(deliveries), **named)


def _correlation_of(headers: bytes | None) -> str | None:
    """Headers are decoded only where the name occurs in them."""
    if not headers or (not isinstance(headers, dict) and _MARK not in headers):
        return None
    return decode_headers(headers).get(CORRELATION_ID)


def _named(events: Sequence[tuple[int, int, str, str | None]]) -> dict[str, Any]:
    """The keys of a burst, and whose it is: an event's own id where all have the same, else one for the burst."""
    keys = {key for _, _, key, _ in events}
    ids = {correlation_id: None for *_, correlation_id in events}
    fields: dict[str, Any] = {"keys": sorted(keys)[:NAMED_MAX], "key_count": len(keys)}
    if len(ids) == 1 and (only := next(iter(ids))) is not None:
        return fields | {"correlation_id": only}
    if len(events) == 1:
        return fields | {"correlation_id": f"{events[0][0]:x}-{events[0][1]}"}
    ids.pop(None, None)
    if ids:
        fields |= {"correlation_ids": list(ids)[:NAMED_MAX], "correlation_id_count": len(ids)}
    return fields | {"correlation_id": secrets.token_hex(8)}
