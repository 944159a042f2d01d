"""Payloads: what users hand in, as bytes; and bytes, as what users ask for.

Bytes travel as they are. Text, JSON-like values, pydantic models, dataclasses and msgspec structs
are encoded once here and marked with a content type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import EventInvalid, EventTooLarge, PayloadInvalid
from .event import CONTENT_TYPE, CORRELATION_ID

if TYPE_CHECKING:
    from .event import Event

JSON = "application/json"
TEXT = "text/plain"
HEADERS_BYTES_MAX = 64 * 1024

_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,128}")
_HEADER_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_encode_json = msgspec.json.Encoder().encode
_encode_headers = msgspec.msgpack.Encoder().encode
_ENCODED_TYPE = {kind: _encode_headers({CONTENT_TYPE: kind}) for kind in (JSON, TEXT)}


def encode_payload(payload: Any, limit_bytes: int) -> tuple[bytes, str | None]:
    """Return the bytes and their content type (None for plain bytes); over the limit is refused before a copy."""
    if isinstance(payload, (bytes, bytearray, memoryview)):
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        if size > limit_bytes:
            raise EventTooLarge("payload", size, limit_bytes)
        return bytes(payload), None
    if isinstance(payload, str):
        if len(payload) > limit_bytes:
            raise EventTooLarge("payload", len(payload), limit_bytes)
        body, kind = _encode_text(payload), TEXT
    else:
        body, kind = _encode_value(payload), JSON
    if len(body) > limit_bytes:
        raise EventTooLarge("payload", len(body), limit_bytes)
    return body, kind


def encode_headers(
    headers: Mapping[str, str] | None, correlation_id: str | None, content_type: str | None
) -> bytes | None:
    """Encode the headers of one event, or None where there are none. Headers given win over our own."""
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
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise EventInvalid(
                f"header name {name!r} refused: lower-case letters, digits and -_. only; not stored"
            )
        if not isinstance(value, str) or _HEADER_CONTROL.search(value):
            raise EventInvalid(
                f"header {name!r} refused: its value is not text without control characters; not stored"
            )
    try:
        encoded = _encode_headers(merged)
    except UnicodeEncodeError as error:
        raise EventInvalid(f"headers refused: {error}; not stored") from error
    if len(encoded) > HEADERS_BYTES_MAX:
        raise EventTooLarge("headers", len(encoded), HEADERS_BYTES_MAX)
    return encoded


def decode_payload(event: Event, type_: Any) -> Any:
    """Return the payload of `event` as `type_` (None: by its content type); raise `PayloadInvalid`."""
    payload = event.payload
    if type_ is None:
        type_ = {JSON: Any, TEXT: str}.get(event.content_type or "", bytes)
    if type_ is bytes:
        return payload
    try:
        if type_ is str and event.content_type != JSON:
            return payload.decode()
        if hasattr(type_, "model_validate_json"):
            return type_.model_validate_json(payload)
        return msgspec.json.decode(payload, type=type_)
    except ValueError as error:  # pydantic's and msgspec's validation errors are ValueErrors
        name = getattr(type_, "__name__", str(type_))
        raise PayloadInvalid(f"the payload is not a {name}: {error}", event) from error


def _encode_text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise PayloadInvalid(f"the text is not UTF-8: {error}") from error


def _encode_value(value: Any) -> bytes:
    serializer = getattr(type(value), "__pydantic_serializer__", None)
    try:
        if serializer is not None:
            encoded: bytes = serializer.to_json(value)
            return encoded
        return _encode_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadInvalid(
            f"a payload of type {type(value).__name__} cannot be encoded: {error}"
        ) from error
