"""JSON Schema: conversion of the user's schema to a canonical text with a hash, and to a validation function.

Every process must be able to validate a schema, even without the model class. So the registered schema is always a JSON
Schema that compiles here; a pydantic model is first converted to its JSON Schema. Only this module imports
jsonschema-rs, which never fetches references from the network or from files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from zbus.errors import ConfigInvalid, SchemaError

HASH_DIGITS = 32
SCHEMA_BYTES_MAX = 1024 * 1024
REASON_CHARACTERS_MAX = 500

# Takes a payload and raises any exception if the payload is invalid.
Validate = Callable[[bytes], object]


def to_json_schema(expression: str, given: Any) -> tuple[dict[str, Any], Any]:
    """Return the JSON Schema of a pydantic model, a dict or JSON text, and the model or None. Raises `SchemaError`."""
    model = given if isinstance(given, type) and hasattr(given, "__pydantic_validator__") else None
    if model is not None and hasattr(model, "model_json_schema"):
        try:
            found = model.model_json_schema()
        except Exception as error:  # pydantic's errors, and any error of the model's hooks
            raise SchemaError(expression, f"{model.__name__} has no JSON Schema: {_short(error)}") from error
    elif isinstance(given, (str, bytes, bytearray)):
        try:
            found = json.loads(given, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise SchemaError(expression, f"the text is not JSON: {_short(error)}") from error
    elif isinstance(given, dict):
        found = given
    else:
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        raise SchemaError(expression, f"{name} must be a pydantic model, a dict or JSON text")
    if not isinstance(found, dict):
        raise SchemaError(expression, f"a JSON Schema must be an object, not {type(found).__name__}")
    # Encode and decode once, because the caller's dict may change later.
    return json.loads(canonical(expression, found)), model


def canonical(expression: str, schema: dict[str, Any]) -> str:
    """Return the canonical text of a schema: sorted keys, no spaces. Raises `SchemaError` if that fails."""
    try:
        text = json.dumps(schema, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(expression, f"the schema cannot be written as JSON: {_short(error)}") from error
    if size > SCHEMA_BYTES_MAX:
        raise SchemaError(expression, f"the schema has {size:,} bytes, over the limit of {SCHEMA_BYTES_MAX:,}")
    return text


def hash_of(text: str) -> str:
    """Return the hash of a canonical text. It is the same in every process and on every machine."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def compile_schema(expression: str, schema: dict[str, Any]) -> Validate:
    """Return a function that validates payloads. Raises `SchemaError` if the schema is not a valid JSON Schema."""
    try:
        import jsonschema_rs
    except ImportError as error:
        reason = "schemas need jsonschema-rs, which is missing: pip install 'zbus-mesh[schema]'"
        raise ConfigInvalid("schema", reason) from error

    try:
        validate = jsonschema_rs.validator_for(schema, retriever=_refuse_to_fetch).validate
    except Exception as error:
        wrong = getattr(error, "message", None) or error
        raise SchemaError(expression, f"not a valid JSON Schema: {_short(wrong)}") from error
    decode = msgspec.json.decode

    def check(body: bytes) -> None:
        validate(decode(body))

    return check


def compile_model(model: Any) -> Validate:
    """Return a function that validates payloads with pydantic: strictly, because JSON Schema rejects "1" for 1."""
    return partial(model.__pydantic_validator__.validate_json, strict=True)


def reason_of(error: Exception) -> str:
    """Return why a payload is invalid, as one short line, from the error of the library that rejected it."""
    if isinstance(error, msgspec.MsgspecError):
        return f"it is not JSON: {_short(error)}"
    if hasattr(error, "instance_path"):  # from jsonschema-rs
        return f"{_place(error.instance_path)}: {_short(getattr(error, 'message', error))}"
    if hasattr(error, "errors") and hasattr(error, "error_count"):  # from pydantic
        found = error.errors(include_url=False, include_context=False, include_input=False)
        if found[0]["type"] == "json_invalid":
            return f"it is not JSON: {_short(found[0]['msg'].removeprefix('Invalid JSON: '))}"
        return _short("; ".join(f"{_place(each['loc'])}: {each['msg']}" for each in found[:3]))
    return _short(f"{type(error).__name__}: {error}")


def _place(path: Any) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _short(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= REASON_CHARACTERS_MAX else line[: REASON_CHARACTERS_MAX - 1] + "…"


def _refuse_to_fetch(uri: str) -> Any:
    raise ValueError(f"{uri} is not part of the schema: put it under $defs")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
