"""Headers: short texts beside the payload, encoded once. An event without headers has no encoded headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec

from .errors import EventInvalid, EventTooLarge
from .util.malformed import MALFORMED

# The headers that zbus itself uses. Names are lower case; all others belong to users.
CORRELATION_ID = "correlation-id"
CONTENT_TYPE = "content-type"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"
SCHEMA = "schema"

JSON = "application/json"
TEXT = "text/plain"

HEADERS_BYTES_MAX = 64 * 1024
NO_HEADERS: Mapping[str, str] = MappingProxyType({})  # shared by all events without headers, so it must not change

_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,128}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, str]).decode
_ENCODED_TYPE = {kind: _encode({CONTENT_TYPE: kind}) for kind in (JSON, TEXT)}


def encode_headers(
    headers: Mapping[str, str] | None, correlation_id: str | None, content_type: str | None
) -> bytes | None:
    """Encode the headers of one event, or return None without headers. Given headers override those of zbus.

    Headers of a stored or received event are passed on without decoding them, unless something is added.
    """
    if headers is not None and not isinstance(headers, Mapping):
        raise EventInvalid(f"headers are names and values, not {type(headers).__name__}; not stored")
    if type(headers) is Headers and correlation_id is None and content_type is None:
        return _check_size(headers.raw)
    if not headers and correlation_id is None:
        return None if content_type is None else _ENCODED_TYPE[content_type]
    merged: dict[str, str] = {}
    has_subclasses = False
    if content_type is not None:
        merged[CONTENT_TYPE] = content_type
    if correlation_id is not None:
        merged[CORRELATION_ID] = correlation_id
    if headers:
        merged.update(headers)
        if correlation_id is not None and merged[CORRELATION_ID] != correlation_id:
            raise EventInvalid(
                f"correlation_id is {correlation_id!r}, and the header {CORRELATION_ID!r} is "
                f"{merged[CORRELATION_ID]!r}: give one of them; not stored"
            )
    for name, value in merged.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise EventInvalid(f"header name {name!r} rejected: lower-case letters, digits and -_. only; not stored")
        if not isinstance(value, str) or _CONTROL.search(value):
            raise EventInvalid(f"header {name!r} rejected: it must be text without control characters; not stored")
        has_subclasses = has_subclasses or type(name) is not str or type(value) is not str
    if has_subclasses:  # such as a StrEnum: the encoder accepts only `str` itself
        merged = {str.__str__(name): str.__str__(value) for name, value in merged.items()}
    try:
        encoded = _encode(merged)
    except UnicodeEncodeError as error:
        raise EventInvalid(f"headers rejected: {error}; not stored") from error
    return _check_size(encoded)


def _check_size(encoded: bytes) -> bytes:
    if len(encoded) > HEADERS_BYTES_MAX:
        raise EventTooLarge("headers", len(encoded), HEADERS_BYTES_MAX)
    return encoded


class Headers(Mapping[str, str]):
    """Encoded headers, decoded when some code reads them. `raw` is passed on unchanged until then."""

    __slots__ = ("_decoded", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._decoded: dict[str, str] | None = None

    def _all(self) -> dict[str, str]:
        if self._decoded is None:
            self._decoded = _decode(self.raw)
        return self._decoded

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __bool__(self) -> bool:
        return True  # an event without headers has `NO_HEADERS`

    def __repr__(self) -> str:
        return repr(self._all())

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self._all()),)


class SpanHeaders(dict[str, str]):
    """The headers of an event that is published inside a span: the given headers, and the context of the span.

    `sent` is set to the event's publisher id, its sequence, and the size of its payload in bytes.
    """

    __slots__ = ("sent",)

    def __init__(self, context: Mapping[str, str], headers: Mapping[str, str] | None) -> None:
        super().__init__(context)
        if headers:
            self.update(headers)  # given headers override the context
        self.sent: tuple[int, int, int] | None = None


def takes_span(headers: object) -> bool:
    """Return whether a span can add its context to these headers. Others have it, or are rejected when encoded."""
    return type(headers) is not SpanHeaders and (headers is None or isinstance(headers, Mapping))


def decode_headers(encoded: bytes | None) -> Mapping[str, str]:
    """Return encoded headers as a mapping that is decoded when it is read."""
    return Headers(encoded) if encoded else NO_HEADERS


def raw_headers(headers: Mapping[str, str]) -> bytes | None:
    """Return the encoded form of an event's headers, or None without headers."""
    if type(headers) is Headers:
        return headers.raw
    return _encode(dict(headers)) if headers else None


def check_encoded(encoded: bytes) -> None:
    """Check headers that another process encoded. Raises `EventInvalid` if they could not have been published."""
    try:
        headers = _decode(encoded)
    except MALFORMED as error:
        raise EventInvalid(f"headers cannot be decoded ({error}); not stored") from error
    encode_headers(headers, None, None)
