"""Dynamo's envelope: a msgpack map of five keys in a fixed order, with the time in milliseconds.

Keys that a later version adds are ignored; any other malformed input is rejected with the
reason. Numbers that an event of zbus cannot represent (over 63 bits) are rejected as well.
"""

from __future__ import annotations

import msgspec

from zbus.event import Event
from zbus.util.malformed import MALFORMED

from .refusal import NotDynamo

NS_PER_MS = 1_000_000
NUMBER_END = 1 << 63
TIME_MS_MAX = (NUMBER_END - 1) // NS_PER_MS


class DynamoEnvelope(msgspec.Struct, frozen=True, gc=False):
    """An event as Dynamo writes it. The fields are in the order of the wire; `published_at` is in milliseconds."""

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes

    def event(self, key: str) -> Event:
        """Return the envelope as an event on `key`."""
        return Event(self.publisher_id, self.sequence, self.published_at * NS_PER_MS, key, self.payload)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(DynamoEnvelope).decode


def encode(publisher_id: int, sequence: int, published_at_ns: int, topic: str, payload: bytes) -> bytes:
    """Return the bytes of one envelope.

    >>> encode(1, 0, 5_000_000, "t", b"x")[:14]
    b'\\x85\\xacpublisher_id'
    """
    return _encode(DynamoEnvelope(publisher_id, sequence, published_at_ns // NS_PER_MS, topic, payload))


def decode(data: bytes | memoryview) -> DynamoEnvelope:
    """Return the envelope in `data`. Raises `NotDynamo` with the reason if it is malformed.

    >>> decode(encode(1, 0, 5_999_999, "t", b"x")).published_at
    5
    """
    try:
        envelope = _decode(data)
    except MALFORMED as error:
        raise NotDynamo("invalid_envelope", f"not a dynamo envelope: {error}") from error
    if min(envelope.publisher_id, envelope.sequence, envelope.published_at) < 0:
        raise NotDynamo("invalid_number", "not a dynamo envelope: a negative number")
    if max(envelope.publisher_id, envelope.sequence) >= NUMBER_END:
        raise NotDynamo("invalid_number", "not a dynamo envelope: a number over 63 bits")
    if envelope.published_at > TIME_MS_MAX:
        raise NotDynamo("invalid_number", "not a dynamo envelope: a time after the year 2262")
    return envelope
