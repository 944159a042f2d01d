"""Headers: small text beside the payload. Encoded once, and absent where there are none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

import msgspec

from .errors import EventInvalid, EventTooLarge

# The headers that zbus itself knows. Names are lower case; others are the user's.
CORRELATION_ID = "correlation-id"
CONTENT_TYPE = "content-type"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"
SCHEMA = "schema"

JSON = "application/json"
TEXT = "text/plain"

HEADERS_BYTES_MAX = 64 * 1024
NO_HEADERS: Mapping[str, str] = {}

_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,128}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, str]).decode
_decode_source = msgspec.msgpack.Decoder(tuple[int, int, tuple[int, ...], str, dict[str, str]]).decode
_SOURCE = 0x95  # an array of five: the headers of an event that another node published, and where it came from
_ENCODED_TYPE = {kind: _encode({CONTENT_TYPE: kind}) for kind in (JSON, TEXT)}


def encode_headers(
    headers: Mapping[str, str] | None, correlation_id: str | None, content_type: str | None
) -> bytes | None:
    """Encode the headers of one event, or None where there are none. Headers given win over our own."""
    if headers is not None and not isinstance(headers, Mapping):
        raise EventInvalid(f"headers are names and values, not {type(headers).__name__}; not stored")
    if not headers and correlation_id is None:
        return None if content_type is None else _ENCODED_TYPE[content_type]
    merged: dict[str, str] = {}
    if content_type is not None:
        merged[CONTENT_TYPE] = content_type
    if correlation_id is not None:
        merged[CORRELATION_ID] = correlation_id
    if headers:
        merged.update(headers)
    for name, value in merged.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise EventInvalid(f"header name {name!r} refused: lower-case letters, digits and -_. only; not stored")
        if not isinstance(value, str) or _CONTROL.search(value):
            raise EventInvalid(f"header {name!r} refused: its value is not text without control characters; not stored")
    try:
        encoded = _encode(merged)
    except UnicodeEncodeError as error:
        raise EventInvalid(f"headers refused: {error}; not stored") from error
    if len(encoded) > HEADERS_BYTES_MAX:
        raise EventTooLarge("headers", len(encoded), HEADERS_BYTES_MAX)
    return encoded


class Foreign(dict[str, str]):
    """The headers of an event that was received and recorded here: the same, and where it came from.

    `origin` is the node that sent it, `offset` its place in the log there, `via` the bridges it crossed
    before, `link` the transport over which it came.
    """

    __slots__ = ("link", "offset", "origin", "via")

    def __init__(
        self, headers: Mapping[str, str], origin: int, offset: int, via: tuple[int, ...] = (), link: str = ""
    ) -> None:
        super().__init__(headers)
        self.origin, self.offset, self.via, self.link = origin, offset, via, link

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)  # elsewhere it is an event like any other


def is_foreign(encoded: bytes | None) -> bool:
    """Whether encoded headers are those of an event that another node published."""
    return encoded is not None and encoded[0] == _SOURCE


class Traced(dict[str, str]):
    """The headers of what is published inside a span: those given, and the context of the span.

    `sent` is told which event it became: publisher, sequence, and the bytes of its payload.
    """

    __slots__ = ("sent",)

    def __init__(self, context: Mapping[str, str], headers: Mapping[str, str] | None) -> None:
        super().__init__(context)
        if headers:
            self.update(headers)  # headers given win
        self.sent: tuple[int, int, int] | None = None


def encode_foreign(headers: Foreign) -> bytes:
    """What the log keeps of headers that came with an event from another node."""
    return _encode((headers.origin, headers.offset, headers.via, headers.link, dict(headers)))


def decode_headers(encoded: bytes | dict[str, str] | None) -> Mapping[str, str]:
    """The headers of a stored event, unless they are decoded already; none is the common case."""
    if not encoded and type(encoded) is not Foreign:
        return NO_HEADERS
    if isinstance(encoded, dict):
        return encoded
    assert encoded is not None
    if encoded[0] == _SOURCE:
        origin, offset, via, link, headers = _decode_source(encoded)
        return Foreign(headers, origin, offset, via, link)
    return cast("Mapping[str, str]", _decode(encoded))
