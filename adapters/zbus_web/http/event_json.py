"""The JSON form of an event, shared by event streams, pages of the log, GraphQL and the console.

It is the form of `zbus sub --json`, except that 64-bit numbers are text, because JavaScript's numbers have 53 bits.
"""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from functools import lru_cache

import msgspec
from msgspec import UNSET, UnsetType

from zbus.event import Event
from zbus.util.memo import Memo

FRAMES_KEPT = 1024  # An event goes to many streams within one burst, and seldom later.
FRAME_KEPT_BYTES_MAX = 16 * 1024


class _EventJson(msgspec.Struct, gc=False):
    offset: int
    key: str
    publisher_id: str
    sequence: int
    published_at: str
    published_ns: str
    headers: dict[str, str]
    payload: str | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode


def event_json(event: Event) -> bytes:
    """Return the event as a JSON object. A payload that is not UTF-8 becomes `payload_base64`.

    >>> event_json(Event(7, 0, 1_700_000_000_000_000_000, "a/b", b"hello", {}, 3)).decode()
    '{"offset":3,"key":"a/b","publisher_id":"7","sequence":0,"published_at":"2023-11-14T22:13:20.000000+00:00",\
"published_ns":"1700000000000000000","headers":{},"payload":"hello"}'
    """
    body = _EventJson(
        event.offset,
        event.key,
        str(event.publisher_id),
        event.sequence,
        iso_time(event.published_at),
        str(event.published_at),
        dict(event.headers),
    )
    try:
        body.payload = event.payload.decode()
    except UnicodeDecodeError:
        body.payload_base64 = b64encode(event.payload).decode()
    return _encode(body)


def iso_time(time_ns: int) -> str:
    """Return Unix nanoseconds as ISO 8601 in UTC, truncated to microseconds. A float would have too few digits.

    >>> iso_time(1_700_000_000_123_456_789)
    '2023-11-14T22:13:20.123456+00:00'
    """
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    return f"{_second(seconds)}.{nanoseconds // 1000:06}+00:00"


@lru_cache(64)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class EventFrames:
    """Events of one log as frames of an event stream, each encoded once for all clients. Frames are cached by offset.

    >>> EventFrames().frame(Event(7, 0, 0, "a", b"x", {}, 3))[:14]
    b'id: 3\\ndata: {"'
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept = Memo[int, bytes](FRAMES_KEPT)

    def frame(self, event: Event) -> bytes:
        """Return the bytes that a stream sends for an event."""
        kept = self._kept
        frame = kept.get(event.offset)
        if frame is None:
            frame = b"id: %d\ndata: %b\n\n" % (event.offset, event_json(event))
            if len(frame) <= FRAME_KEPT_BYTES_MAX:
                kept[event.offset] = frame
        return frame
