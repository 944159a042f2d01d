"""Plain messages: NATS messages without the zbus envelope, as events, and events as such messages.

The payload is unchanged. NATS headers become the event's headers, with names in lower case. A message that zbus sends
has an additional header `Zbus-Event` with the event's identity. Every reader recognizes it as the same event, so
bridges cannot create a loop. Headers that cannot be carried are dropped and counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zbus.event import Event
from zbus.headers import HEADERS_BYTES_MAX, NO_HEADERS
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED

MARK = "zbus-event"
_MARK_VALUE = re.compile(r"(\d{1,19}) (\d{1,19}) (\d{1,19})")
_NUMBER_MAX = 1 << 63

_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,128}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Identity = tuple[int, int, int]  # publisher_id, sequence, published_at


def read_headers(block: bytes | None, counts: Counters, subject: bytes) -> tuple[Mapping[str, str], Identity | None]:
    """Return the headers of a message, and the identity of its event, or None if it was not sent by zbus."""
    if block is None:
        return NO_HEADERS, None
    headers: dict[str, str] = {}
    identity = None
    capacity = HEADERS_BYTES_MAX
    for line in block.split(b"\r\n")[1:]:
        if not line:
            continue
        name, value = _read_line(line)
        if name == MARK:
            identity = _read_identity(value)
            if identity is None:
                counts.report(TRANSPORT_INPUT_REJECTED, "identity_malformed", subject.decode(errors="replace"))
            continue
        capacity -= len(line) + 8
        if not _NAME.fullmatch(name) or _CONTROL.search(value) or capacity < 0:
            counts.report(TRANSPORT_INPUT_REJECTED, "header_rejected", subject.decode(errors="replace"))
        else:
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if identity is not None:  # an event of zbus, with its original headers
        headers = {name: value for name, value in headers.items() if not name.startswith("nats-")}
    return headers, identity


def fits(event: Event, headers: bytes, payload_max: int, counts: Counters) -> bool:
    """Return whether the server takes a message of this size. An event that is too large is counted and reported."""
    size = len(event.payload)
    if len(headers) + size <= payload_max:
        return True
    counts.report(TRANSPORT_INPUT_REJECTED, "too_large", event.key, size_bytes=size, limit_bytes=payload_max)
    return False


def _read_line(line: bytes) -> tuple[str, str]:
    """Return the name and the value of a header line. The name is empty, and so rejected, if the line is malformed."""
    name, colon, value = line.partition(b":")
    try:
        return (name.decode("ascii").lower() if colon else ""), value.strip(b" \t").decode()
    except UnicodeDecodeError:
        return "", ""


def _read_identity(value: str) -> Identity | None:
    found = _MARK_VALUE.fullmatch(value)
    if found is None:
        return None
    publisher_id, sequence, published_at = int(found[1]), int(found[2]), int(found[3])
    if max(publisher_id, sequence, published_at) >= _NUMBER_MAX:
        return None
    return publisher_id, sequence, published_at


def write_headers(event: Event, counts: Counters, more: str = "") -> bytes:
    """Return the header block of an event. Headers that are reserved by NATS are left out."""
    lines = [f"NATS/1.0\r\nZbus-Event: {event.publisher_id} {event.sequence} {event.published_at}\r\n{more}"]
    for name, value in event.headers.items():
        if name == MARK or name.startswith("nats-"):
            counts.add("header_reserved")
        elif not _NAME.fullmatch(name) or _CONTROL.search(value):
            counts.report(TRANSPORT_INPUT_REJECTED, "header_rejected", event.key)
        else:
            lines.append(f"{name}: {value}\r\n")
    return ("".join(lines) + "\r\n").encode()
