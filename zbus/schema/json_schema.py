"""JSON Schema: what users hand in as one canonical text with a hash, and as a function that checks bytes.

The schema is the contract, and every process must be able to check it, also one that has no model class. So what is
registered is always a JSON Schema that compiles here; a pydantic model is first turned into its own. jsonschema-rs is
imported here and nowhere else, and never fetches what a schema refers to: no network, no files.
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

# Takes a payload; raises whatever it likes where that does not fit.
Validate = Callable[[bytes], object]


def to_json_schema(expression: str, given: Any) -> tuple[dict[str, Any], Any]:
    """The JSON Schema of a pydantic model, a dict or JSON text; and the model, if it is one."""
    model = given if isinstance(given, type) and hasattr(given, "__pydantic_validator__") else None
    if model is not None and hasattr(model, "model_json_schema"):
        try:
            found = model.model_json_schema()
        except Exception as error:  # pydantic's own, and whatever a hook of the model raises
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
        raise SchemaError(expression, f"{name} is no pydantic model, no dict and no JSON text")
    if not isinstance(found, dict):
        raise SchemaError(expression, f"a JSON Schema is an object here, not {type(found).__name__}")
    # Once through text: the caller's dict may change later, and what is stored is what is checked.
    return json.loads(canonical(expression, found)), model


def canonical(expression: str, schema: dict[str, Any]) -> str:
    """The one text of a schema: sorted, without spaces."""
    try:
        text = json.dumps(schema, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(expression, f"the schema cannot be written as JSON: {_short(error)}") from error
    if size > SCHEMA_BYTES_MAX:
        raise SchemaError(expression, f"the schema has {size:,} bytes, over the limit of {SCHEMA_BYTES_MAX:,}")
    return text


def hash_of(text: str) -> str:
    """The hash of a canonical text: the same in every process and on every machine."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def compile_schema(expression: str, schema: dict[str, Any]) -> Validate:
    """A function that checks payloads; `SchemaError` where this is no valid JSON Schema."""
    try:
        import jsonschema_rs
    except ImportError as error:
        reason = "schemas need jsonschema-rs, which is missing: pip install 'zbus-mesh[schema]'"
        raise ConfigInvalid("schema", reason) from error

    try:
        validate = jsonschema_rs.validator_for(schema, retriever=_refuse_to_fetch).validate
    except Exception as error:
        wrong = getattr(error, "message", None) or error
        raise SchemaError(expression, f"this is no valid JSON Schema: {_short(wrong)}") from error
    decode = msgspec.json.decode

    def check(body: bytes) -> None:
        validate(decode(body))

    return check


def compile_model(model: Any) -> Validate:
    """The same through pydantic. Strictly, because its JSON Schema does not turn "1" into 1 either."""
    return partial(model.__pydantic_validator__.validate_json, strict=True)


def reason_of(error: Exception) -> str:
    """Why a payload does not fit, in one short line, from the error of whichever library found it."""
    if isinstance(error, msgspec.MsgspecError):
        return f"it is not JSON: {_short(error)}"
    if hasattr(error, "instance_path"):  # of jsonschema-rs
        return f"{_place(error.instance_path)}: {_short(getattr(error, 'message', error))}"
    if hasattr(error, "errors") and hasattr(error, "error_count"):  # of pydantic
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
