"""Payloads: encoding of users' values to bytes, and decoding of bytes to the requested type.

Bytes are not changed. Text, JSON-like values, pydantic models, dataclasses and msgspec structs are
encoded once here and marked with a content type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from .errors import EventLike, EventTooLarge, PayloadInvalid
from .headers import JSON, TEXT


def _model_inside(value: Any) -> Any:
    """Convert a pydantic model inside a list or dict, or a subclass of `int` such as an offset."""
    if isinstance(value, int):
        return int(value)
    if hasattr(type(value), "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _model_of(type_: Any, value: Any) -> Any:
    """Convert a decoded value to a pydantic model inside another type."""
    if hasattr(type_, "model_validate"):
        return type_.model_validate(value)
    raise TypeError(f"JSON cannot be decoded as {type_.__name__}")


_encode_json = msgspec.json.Encoder(enc_hook=_model_inside).encode


def encode_payload(payload: Any, limit_bytes: int) -> tuple[bytes, str | None]:
    """Return the bytes and their content type (None for plain bytes).

    Raises `EventTooLarge` over the limit, before bytes are copied, and `PayloadInvalid` if a value cannot be encoded.
    """
    if type(payload) is bytes and len(payload) <= limit_bytes:
        return payload, None  # the hot path
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


def check_many(payloads: object) -> None:
    """Raise `PayloadInvalid` if `payloads` is one payload, whose keys or letters would be published one by one."""
    one = isinstance(payloads, (str, bytes, bytearray, memoryview, Mapping)) or hasattr(type(payloads), "model_dump")
    if one or not isinstance(payloads, Iterable):
        name = type(payloads).__name__
        raise PayloadInvalid(f"publish_many takes a list of payloads, not {name}: use publish() for one payload")


def decode_payload(event: EventLike, type_: Any) -> Any:
    """Return the payload of `event` as `type_` (None: by its content type). Raises `PayloadInvalid`."""
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
        return msgspec.json.decode(payload, type=type_, dec_hook=_model_of)
    except (ValueError, TypeError) as error:  # pydantic's and msgspec's validation errors are ValueErrors
        name = getattr(type_, "__name__", str(type_))
        raise PayloadInvalid(f"the payload is not a valid {name}: {error}", event) from error


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
        raise PayloadInvalid(f"a payload of type {type(value).__name__} cannot be encoded: {error}") from error
