"""Envelopes on the wire, one or several in a frame.

An envelope is a msgpack array. The five fields of every event plane come first (publisher_id,
sequence, published_at, topic, payload), then key, headers, the offset in the sender's log, which log
that is (`origin`), the offset of the event before it on the same key there (`previous`), and the bridges
it crossed (`via`). A reader accepts further fields at the end, so that later versions can add some.

A frame is one byte that says what follows, then msgpack: one envelope, or an array of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from zbus.errors import EventInvalid, KeyInvalid
from zbus.event import Event
from zbus.headers import decode_headers, raw_headers
from zbus.keys import check_key
from zbus.observe.records import RECORDS
from zbus.util.memo import Memo

ONE, MANY, BEACON, CANCEL, NODE = 1, 2, 3, 4, 5  # the first byte of a frame
VIA_MAX = 16  # bridges in a row
KEYS_KEPT_MAX = 10_000
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

# An envelope before it is encoded: the fields of `Envelope`, in order.
Fields = tuple[int, int, int, str, bytes, str, msgspec.Raw, int, int, int, tuple[int, ...]]

_ONE, _MANY = bytes([ONE]), bytes([MANY])
_encode = msgspec.msgpack.Encoder().encode
_NO_HEADERS = b"\x80"
EMPTY = msgspec.Raw(_NO_HEADERS)


class Envelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An event as it travels. `origin` 0 stands for a sender that has no place to ask for what is missing."""

    publisher_id: _Number
    sequence: _Number
    published_at: _Number
    topic: str
    payload: bytes
    key: str
    headers: msgspec.Raw  # an encoded map of texts; `open_frame` has checked it
    offset: _Number
    origin: _Number = 0
    previous: _Number = 0
    via: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=VIA_MAX)] = ()

    def event(self, offset: int = 0) -> Event:
        """The event, at an offset of this node's log, or at none."""
        headers = decode_headers(self.raw_headers)
        return Event(self.publisher_id, self.sequence, self.published_at, self.key, self.payload, headers, offset)

    @property
    def raw_headers(self) -> bytes | None:
        """The encoded headers, or None if there are none."""
        raw = bytes(self.headers)  # a copy: the frame can then be freed
        return None if raw == _NO_HEADERS else raw


def encoded_headers(raw: bytes | None) -> msgspec.Raw:
    """Return encoded headers as a field of an envelope."""
    return EMPTY if raw is None else msgspec.Raw(raw)


_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode
_decode_one = msgspec.msgpack.Decoder(Envelope).decode
_decode_many = msgspec.msgpack.Decoder(list[Envelope]).decode


def encode(event: Event, origin: int = 0, previous: int = 0, via: tuple[int, ...] = ()) -> bytes:
    """A frame with the envelope of one event.

    >>> decode(encode(Event(1, 0, 5, "a/b", b"x"))).key
    'a/b'
    """
    fields = (
        event.publisher_id,
        event.sequence,
        event.published_at,
        event.topic,
        event.payload,
        event.key,
        encoded_headers(raw_headers(event.headers)),
        event.offset,
    )
    return _ONE + _encode((*fields, origin, previous, via) if origin else fields)


def encode_run(run: Sequence[Fields]) -> bytes:
    """A frame of some envelopes, in one call."""
    return _ONE + _encode(run[0]) if len(run) == 1 else _MANY + _encode(run)


def join(frames: Sequence[bytes]) -> bytes:
    """One frame of several that hold one envelope each.

    >>> [event.sequence for event in unpack(join([encode(Event(1, n, 5, "a/b", b"x")) for n in (0, 1)]))]
    [0, 1]
    """
    if len(frames) == 1:
        return frames[0]
    return b"".join((_MANY, b"\xdd", len(frames).to_bytes(4), *[frame[1:] for frame in frames]))


def events_in(frame: bytes) -> int:
    """Return how many events a frame claims to hold, without decoding it; 0 for other frames.

    >>> events_in(join([encode(Event(1, n, 5, "a/b", b"x")) for n in (0, 1, 2)])), events_in(b"\\x03")
    (3, 0)
    """
    kind = frame[0] if frame else 0
    if kind == ONE:
        return 1
    if kind != MANY or len(frame) < 2:
        return 0
    mark = frame[1]  # of a msgpack array: its length is in the mark itself, or follows in 2 or 4 bytes
    if mark >> 4 == 0x9:
        return mark & 0xF
    return int.from_bytes(frame[2:4] if mark == 0xDC else frame[2:6])


def decode(frame: bytes) -> Event:
    """The event of a frame that holds one, with the offset in the sender's log."""
    envelopes = open_frame(frame)
    if len(envelopes) != 1:
        raise EventInvalid(f"not one envelope but {len(envelopes)}")
    return envelopes[0].event(envelopes[0].offset)


def unpack(frame: bytes) -> list[Event]:
    """The events of a frame, each with the offset in the sender's log."""
    return [envelope.event(envelope.offset) for envelope in open_frame(frame)]


def open_frame(frame: bytes) -> list[Envelope]:
    """The envelopes of a frame, checked; raise `EventInvalid` with the reason for anything that is none."""
    kind = frame[0] if frame else None
    try:
        if kind == ONE:
            envelope = _decode_one(memoryview(frame)[1:])
            _decode_headers(envelope.headers)
            _checked[envelope.key]
            return [envelope]
        if kind != MANY:
            found = "nothing" if kind is None else kind
            raise EventInvalid(f"not an envelope of version {ONE}: it starts with {found}")
        envelopes = _decode_many(memoryview(frame)[1:])
        for envelope in envelopes:
            if envelope.headers != EMPTY:
                _decode_headers(envelope.headers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise EventInvalid(f"not an envelope: {error}") from error
    for key in {envelope.key for envelope in envelopes}:
        _checked[key]
    return envelopes


def check_received(key: str) -> None:
    """Raise `EventInvalid` for a key from the network that is not legal. Keys repeat, so legal ones are remembered.

    Of the keys of the system, only records travel as events.
    """
    _checked[key]


def _check(key: str) -> None:
    try:
        check_key(key.removeprefix(RECORDS))
    except KeyInvalid as error:
        raise EventInvalid(f"not an envelope: {error}") from error


_checked = Memo[str, None](KEYS_KEPT_MAX, _check)
