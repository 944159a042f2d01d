"""One event as one line, JSON for programs or text for people, for every command that prints events."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.text import Text

from zbus.event import Event

SHOWN_CHARACTERS_MAX = 400

_encode = msgspec.json.Encoder().encode


def json_line(event: Event, **more: Any) -> bytes:
    """Return the event as a line of JSON. A payload that is not UTF-8 is in the field `payload_base64`.

    `more` are further fields.

    >>> json_line(Event(7, 0, 1_700_000_000_000_000_000, "a/b", b"hello", {}, 3)).decode().rstrip()
    '{"offset":3,"key":"a/b","publisher_id":7,"sequence":0,"published_at":"2023-11-14T22:13:20.000000+00:00",\
"published_ns":1700000000000000000,"headers":{},"payload":"hello"}'
    """
    fields: dict[str, Any] = {
        "offset": event.offset,
        "key": event.key,
        "publisher_id": event.publisher_id,
        "sequence": event.sequence,
        "published_at": iso_time(event.published_at),
        "published_ns": event.published_at,
        "headers": dict(event.headers),
    }
    try:
        fields["payload"] = event.payload.decode()
    except UnicodeDecodeError:
        fields["payload_base64"] = base64.b64encode(event.payload).decode()
    return _encode(fields | more) + b"\n"


def readable_line(event: Event) -> Text:
    """Return the event as coloured text for a terminal. Control characters in it are escaped."""
    return readable_head(event).append(f" {_shown(event.payload)}")


def readable_head(event: Event) -> Text:
    """Return the time, offset, key and headers of an event as coloured text."""
    line = Text()
    line.append(f"{_utc(event.published_at).astimezone():%H:%M:%S.%f} ", "dim")
    line.append(f"{event.offset:>8} ", "cyan")
    line.append(printable(event.key), "bold green")
    for name, value in event.headers.items():
        line.append(f" {printable(name)}={printable(value)}", "dim")
    return line


def iso_time(time_ns: int) -> str:
    """Format Unix nanoseconds as ISO 8601 in UTC, truncated to microseconds.

    >>> iso_time(1_700_000_000_123_456_789)
    '2023-11-14T22:13:20.123456+00:00'
    """
    return _utc(time_ns).isoformat(timespec="microseconds")


def _utc(time_ns: int) -> datetime:
    """Convert nanoseconds without a float, which has too few digits."""
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanoseconds // 1000)


def _shown(payload: bytes) -> str:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"{payload[:32].hex(' ')}… ({len(payload):,} bytes)"
    if len(text) <= SHOWN_CHARACTERS_MAX:
        return printable(text)
    return f"{printable(text[:SHOWN_CHARACTERS_MAX])}… ({len(payload):,} bytes)"


def printable(text: str) -> str:
    """Escape the characters that could control a terminal or reorder its letters.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
