"""The boundary: frames of zbus become envelopes of Dynamo, and envelopes become frames.

Events that this wire cannot carry are counted and reported; they do not stop the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zbus.errors import EventInvalid
from zbus.headers import CONTENT_TYPE
from zbus.keys import KeySet
from zbus.observe.counters import Counters
from zbus.observe.records import EVENT_DROPPED
from zbus.wire import envelope as codec

from . import envelope
from .envelope import DynamoEnvelope
from .refusal import NotDynamo
from .scopes import Scoped, place_of_key

EVENT_CHANGED = "EVENT_CHANGED"
SEEN_MAX = 100_000  # events that a receiver remembers, if each may arrive more than once

Identity = tuple[int, int, str]


class DynamoOutgoing(NamedTuple):
    """One event, ready for the wire."""

    place: Scoped
    publisher_id: int
    sequence: int
    body: bytes


def outgoing(frames: Sequence[tuple[str, bytes]], counts: Counters) -> Iterator[DynamoOutgoing]:
    """Return the events of these frames, in order, as Dynamo writes them."""
    for key, frame in frames:
        try:
            place = place_of_key(key)
            events = codec.open_frame(frame)
        except EventInvalid as error:
            counts.report(EVENT_DROPPED, "key_rejected", key, detail=str(error)[:500])
            continue
        for each in events:
            event = each.event()
            if event.headers and any(name != CONTENT_TYPE for name in event.headers):
                counts.report(
                    EVENT_CHANGED, "headers_dropped", key, detail="the dynamo wire carries none; sent without"
                )
            body = envelope.encode(event.publisher_id, event.sequence, event.published_at, place.topic, event.payload)
            yield DynamoOutgoing(place, event.publisher_id, event.sequence, body)


def identity_of(found: DynamoEnvelope, place: Scoped) -> Identity:
    """Return the identity of an event: publisher, sequence and key.

    The key belongs to it, because processes of an older Dynamo gave all of their publishers one id.
    """
    return found.publisher_id, found.sequence, place.key


def incoming(found: DynamoEnvelope, place: Scoped, wanted: KeySet, payload_bytes_max: int) -> bytes | None:
    """Return the frame of an event from the wire, or None if no subscription matches its key.

    Raises `EventInvalid` if the message is malformed.
    """
    if found.topic != place.topic:
        text = f"the topic is {found.topic[:100]!r} inside and {place.topic[:100]!r} outside"
        raise NotDynamo("topic_mismatch", text)
    if len(found.payload) > payload_bytes_max:
        text = f"a payload of {len(found.payload):,} bytes is over the limit of {payload_bytes_max:,}"
        raise NotDynamo("payload_too_large", text)
    key = place.key
    return codec.encode(found.event(key)) if key in wanted else None
