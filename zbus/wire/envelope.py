"""Envelopes: the encoding of events on the wire, one or several in a frame.

An envelope is a msgpack array. The five fields of every event plane come first (publisher_id, sequence, published_at,
topic, payload), then key, headers, the offset in the sender's log, the id of that log (`origin`), the offset of the
previous event on the same key in it (`previous`), and the nodes that forwarded the event (`via`). The first envelope of
a frame also names the incarnation of that log (`branch`), which is the same for all of them. A decoder ignores further
fields at the end, so that later versions can add some; version 0.1 ignores `branch`.

A frame is one byte for its kind, and then msgpack: one envelope, or an array of envelopes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from zbus.errors import EventInvalid, KeyInvalid
from zbus.event import NUMBER_MAX, Event, Provenance
from zbus.headers import decode_headers, raw_headers
from zbus.keys import check_key
from zbus.observe.records import RECORDS
from zbus.ports.lineage import NO_BRANCH, Branch
from zbus.ports.log import Row
from zbus.util.malformed import MALFORMED
from zbus.util.memo import Memo

ONE, MANY, BEACON, CANCEL, NODE = 1, 2, 3, 4, 5  # the first byte of a frame
VIA_MAX = 16  # the largest number of bridges in a row
KEYS_KEPT_MAX = 10_000
_Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]

# An envelope before it is encoded: the fields of `Envelope`, in order.
Fields = tuple[int, int, int, str, bytes, str, msgspec.Raw, int, int, int, tuple[int, ...]]

_ONE, _MANY = bytes([ONE]), bytes([MANY])
_encode = msgspec.msgpack.Encoder().encode
_NO_HEADERS = b"\x80"
EMPTY = msgspec.Raw(_NO_HEADERS)
_EVENT_BYTES_MIN = 8  # an encoded envelope of eight fields
_LOCAL_FIELDS = 8  # the fields up to `offset`: the others say where other nodes can request missing events


class Envelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An event on the wire. `origin` is 0 if the sender is not a node, so that missing events cannot be requested."""

    publisher_id: _Number
    sequence: _Number
    published_at: _Number
    topic: str
    payload: bytes
    key: str
    headers: msgspec.Raw  # an encoded map of strings; `open_frame` has validated it
    offset: _Number
    origin: _Number = 0
    previous: _Number = 0
    via: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=VIA_MAX)] = ()
    branch: Branch = NO_BRANCH

    def event(self, offset: int = 0) -> Event:
        """Return the event, with an offset of this node's log or 0."""
        headers = decode_headers(self.raw_headers)
        return Event(self.publisher_id, self.sequence, self.published_at, self.key, self.payload, headers, offset)

    def row(self, link: str) -> Row:
        """Return the row to store, with the provenance of an event that arrived over `link`."""
        provenance = Provenance(self.origin, self.offset, self.via, link)
        identity = (self.publisher_id, self.sequence, self.published_at)
        return Row(*identity, self.key, self.payload, self.raw_headers, provenance)

    @property
    def raw_headers(self) -> bytes | None:
        """The encoded headers, or None for an event without headers."""
        raw = bytes(self.headers)  # a copy: the frame can then be freed
        return None if raw == _NO_HEADERS else raw


_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode
_decode_one = msgspec.msgpack.Decoder(Envelope).decode
_decode_many = msgspec.msgpack.Decoder(list[Envelope]).decode


def encode(event: Event, origin: int = 0, previous: int = 0, via: tuple[int, ...] = ()) -> bytes:
    """Encode one event as a frame.

    >>> decode(encode(Event(1, 0, 5, "a/b", b"x"))).key
    'a/b'
    """
    fields = fields_of(event, origin, previous, via)
    return _ONE + _encode(fields if origin else fields[:_LOCAL_FIELDS])


def fields_of(event: Event, origin: int = 0, previous: int = 0, via: tuple[int, ...] = ()) -> Fields:
    """Return an event as the fields of an envelope."""
    headers = raw_headers(event.headers)
    return (
        event.publisher_id,
        event.sequence,
        event.published_at,
        event.topic,
        event.payload,
        event.key,
        EMPTY if headers is None else msgspec.Raw(headers),
        event.offset,
        origin,
        previous,
        via,
    )


def encode_run(run: Sequence[Fields], branch: Branch = NO_BRANCH) -> bytes:
    """Encode several envelopes of one log as one frame."""
    if branch.id:
        first = (*run[0], branch)
        return _ONE + _encode(first) if len(run) == 1 else _MANY + _encode([first, *run[1:]])
    return _ONE + _encode(run[0]) if len(run) == 1 else _MANY + _encode(run)


def join(frames: Sequence[bytes]) -> bytes:
    """Join frames of one envelope each into one frame.

    >>> [event.sequence for event in unpack(join([encode(Event(1, n, 5, "a/b", b"x")) for n in (0, 1)]))]
    [0, 1]
    """
    if len(frames) == 1:
        return frames[0]
    return b"".join((_MANY, b"\xdd", len(frames).to_bytes(4), *[frame[1:] for frame in frames]))


def events_in(frame: bytes) -> int:
    """Return how many events a frame claims to hold, but no more than fit, without decoding it; 0 for other frames.

    >>> events_in(join([encode(Event(1, n, 5, "a/b", b"x")) for n in (0, 1, 2)])), events_in(b"\\x03")
    (3, 0)
    """
    kind = frame[0] if frame else 0
    if kind == ONE:
        return 1
    if kind != MANY or len(frame) < 2:
        return 0
    mark = frame[1]  # of a msgpack array: its length is in the mark itself, or follows in 2 or 4 bytes
    claimed = mark & 0xF if mark >> 4 == 0x9 else int.from_bytes(frame[2:4] if mark == 0xDC else frame[2:6])
    return min(claimed, len(frame) // _EVENT_BYTES_MIN)


def decode(frame: bytes) -> Event:
    """Decode a frame of one event, with the offset in the sender's log. Raises `EventInvalid` if it is malformed."""
    envelopes = open_frame(frame)
    if len(envelopes) != 1:
        raise EventInvalid(f"expected one envelope, found {len(envelopes)}")
    return envelopes[0].event(envelopes[0].offset)


def unpack(frame: bytes) -> list[Event]:
    """Decode the events of a frame, each with the offset in the sender's log."""
    return [envelope.event(envelope.offset) for envelope in open_frame(frame)]


def open_frame(frame: bytes) -> list[Envelope]:
    """Decode and validate the envelopes in a frame. Raises `EventInvalid` if the frame is malformed."""
    kind = frame[0] if frame else None
    try:
        if kind == ONE:
            envelope = _decode_one(memoryview(frame)[1:])
            _decode_headers(envelope.headers)
            _checked[envelope.key]
            return [envelope]
        if kind != MANY:
            found = "it is empty" if kind is None else f"its first byte is {kind}"
            raise EventInvalid(f"not an envelope of version {ONE}: {found}")
        envelopes = _decode_many(memoryview(frame)[1:])
        for envelope in envelopes:
            if envelope.headers != EMPTY:
                _decode_headers(envelope.headers)
    except MALFORMED as error:
        raise EventInvalid(f"malformed envelope: {error}") from error
    for key in {envelope.key: None for envelope in envelopes}:
        _checked[key]
    return envelopes


def check_received(key: str) -> None:
    """Raise `EventInvalid` if a key from the network is invalid. Keys repeat, so valid ones are remembered.

    The only valid system keys are those of log records.
    """
    _checked[key]


def _check(key: str) -> None:
    try:
        check_key(key.removeprefix(RECORDS))
    except KeyInvalid as error:
        raise EventInvalid(f"malformed envelope: {error}") from error


_checked = Memo[str, None](KEYS_KEPT_MAX, _check)
