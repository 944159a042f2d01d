"""The envelope on the wire: one version byte, then a msgpack array.

The five fields of every event plane come first (publisher_id, sequence, published_at, topic,
payload), then key, headers and the offset in the sender's log. A reader of this version accepts
further fields at the end, so that later versions can add some.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .errors import EventInvalid, KeyInvalid
from .event import Event
from .keys import check_key

VERSION = 1
_PREFIX = bytes([VERSION])
_encode = msgspec.msgpack.Encoder().encode


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes
    key: str
    headers: dict[str, str]
    offset: int


_decode = msgspec.msgpack.Decoder(_Envelope).decode


def encode(event: Event) -> bytes:
    """The envelope of one event.

    >>> decode(encode(Event(1, 0, 5, "a/b", b"x"))).key
    'a/b'
    """
    headers: Mapping[str, str] = event.headers
    return _PREFIX + _encode(
        (
            event.publisher_id,
            event.sequence,
            event.published_at,
            event.topic,
            event.payload,
            event.key,
            headers,
            event.offset,
        )
    )


def decode(data: bytes) -> Event:
    """Read an envelope; raise `EventInvalid` with the reason for anything that is not one."""
    if data[:1] != _PREFIX:
        found = data[0] if data else "nothing"
        raise EventInvalid(f"not an envelope of version {VERSION}: it starts with {found}")
    try:
        envelope = _decode(memoryview(data)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise EventInvalid(f"not an envelope: {error}") from error
    if min(envelope.publisher_id, envelope.sequence, envelope.published_at, envelope.offset) < 0:
        raise EventInvalid("not an envelope: a negative number")
    if max(envelope.publisher_id, envelope.sequence, envelope.published_at, envelope.offset) >= 1 << 63:
        raise EventInvalid("not an envelope: a number over 63 bits")
    try:
        check_key(envelope.key)
    except KeyInvalid as error:
        raise EventInvalid(f"not an envelope: {error}") from error
    return Event(
        envelope.publisher_id,
        envelope.sequence,
        envelope.published_at,
        envelope.key,
        envelope.payload,
        envelope.headers,
        envelope.offset,
    )
