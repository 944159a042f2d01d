"""The four ZMQ frames of one event: topic, publisher id, sequence, and the envelope behind a header of five bytes.

The ids are on the wire twice, and both places must agree. A message whose frames and envelope name
different events is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import envelope
from .envelope import DynamoEnvelope
from .refusal import NotDynamo

VERSION = 1
HEADER_BYTES = 5
ID_BYTES = 8


def pack(publisher_id: int, sequence: int, body: bytes) -> bytes:
    """Return all frames of an encoded envelope but the topic, in one piece. `split` makes a message of them."""
    return b"".join(
        (
            publisher_id.to_bytes(ID_BYTES),
            sequence.to_bytes(ID_BYTES),
            bytes([VERSION]),
            len(body).to_bytes(4),
            body,
        )
    )


def split(topic: bytes, packed: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the frames of a message. `topic` is the bare topic, or the whole subject if a broker is in between.

    >>> [len(frame) for frame in split(b"t", pack(1, 2, b"body"))]
    [1, 8, 8, 9]
    """
    return topic, packed[:ID_BYTES], packed[ID_BYTES : 2 * ID_BYTES], packed[2 * ID_BYTES :]


def unpack(frames: Sequence[bytes]) -> tuple[bytes, DynamoEnvelope]:
    """Return the topic frame and the envelope of a message. Raises `NotDynamo` with the reason if it is malformed."""
    if len(frames) != 4:
        raise NotDynamo("invalid_frame_count", f"not a dynamo message: {len(frames)} frames, not 4")
    topic, publisher_id, sequence, body = frames
    if len(publisher_id) != ID_BYTES or len(sequence) != ID_BYTES:
        raise NotDynamo("invalid_id_length", "not a dynamo message: an id is not 8 bytes long")
    if len(body) < HEADER_BYTES:
        raise NotDynamo("invalid_header", f"not a dynamo message: a last frame of {len(body)} bytes has no header")
    if body[0] != VERSION:
        raise NotDynamo("invalid_version", f"not a dynamo message: version {body[0]}, not {VERSION}")
    announced = int.from_bytes(body[1:HEADER_BYTES])
    if announced != len(body) - HEADER_BYTES:
        there = len(body) - HEADER_BYTES
        raise NotDynamo("invalid_length", f"not a dynamo message: {announced} bytes announced, {there} received")
    found = envelope.decode(memoryview(body)[HEADER_BYTES:])
    if (found.publisher_id, found.sequence) != (int.from_bytes(publisher_id), int.from_bytes(sequence)):
        raise NotDynamo("identity_mismatch", "not a dynamo message: its frames and its envelope name different events")
    return topic, found
