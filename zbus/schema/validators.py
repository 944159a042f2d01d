"""The validators of the active schemas: which schemas match a key, and whether a payload is valid against them.

`Validators` is created again whenever a schema is registered or removed, so the schemas cached for a key are valid for
as long as the object lives. A bus without schemas has no such object, which is all that publishing and reading check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zbus.errors import SchemaInvalid
from zbus.event import Event
from zbus.keys import matches
from zbus.observe.records import EVENT_INVALID_SCHEMA, record_reason
from zbus.observe.throttle import Throttle
from zbus.ports.log import Schema
from zbus.util.memo import Memo
from zbus.util.runtime import Runtime

from .json_schema import Validate, compile_schema, reason_of

STRICT, PERMISSIVE, REMOVED = "strict", "permissive", "removed"
COUNTED = "invalid_schema"
KEYS_KEPT_MAX = 10_000
PAYLOAD_SHOWN_BYTES = 200

Count = Callable[[str, int], None]


class Validator(NamedTuple):
    """One active schema and the function that validates payloads against it."""

    schema: Schema
    validate: Validate


class Validators(Memo[str, tuple[Validator, ...]]):
    """The validators of each key, strict ones first, so that a permissive one never hides a rejection."""

    def __init__(self, validators: Iterable[Validator], count: Count, throttle: Throttle, runtime: Runtime) -> None:
        super().__init__(KEYS_KEPT_MAX, self._match)
        self._validators = sorted(validators, key=lambda each: each.schema.mode != STRICT)
        self._count, self._throttle, self._runtime = count, throttle, runtime

    def validate(self, key: str, body: bytes) -> None:
        """Validate a payload before it is stored. Raises `SchemaInvalid` if it violates a strict schema."""
        for validator in self[key]:
            try:
                validator.validate(body)
            except Exception as error:  # a user's validator may raise anything
                self._violated(validator, key, body, error, None)
                return  # count an event once, however many schemas it violates

    def validate_received(self, event: Event) -> None:
        """Validate an event before a subscriber receives it. Raises `SchemaInvalid` if it violates a strict schema."""
        for validator in self[event.key]:
            try:
                validator.validate(event.payload)
            except Exception as error:
                self._violated(validator, event.key, event.payload, error, event)
                return

    def first_reason(self, key: str, body: bytes) -> tuple[Schema, str] | None:
        """Return the first schema of any mode that a payload violates, and why, or None. Counts nothing."""
        for validator in self[key]:
            try:
                validator.validate(body)
            except Exception as error:
                return validator.schema, reason_of(error)
        return None

    def _match(self, key: str) -> tuple[Validator, ...]:
        return tuple(each for each in self._validators if matches(each.schema.expression, key))

    def _violated(self, validator: Validator, key: str, body: bytes, error: Exception, event: Event | None) -> None:
        schema, reason = validator.schema, reason_of(error)
        if event is None and schema.mode == STRICT:  # only the publisher gets the error; no event was stored
            raise SchemaInvalid(key, schema.expression, reason, body, schema.hash) from error
        self._count(COUNTED, 1)
        if self._throttle.due(key):
            fields = _fields(schema, key, body, event)
            with self._runtime.running():
                record_reason(EVENT_INVALID_SCHEMA, logging.WARNING, code=COUNTED, reason=reason, **fields)
        if schema.mode == STRICT:
            raise SchemaInvalid(key, schema.expression, reason, body, schema.hash, event) from error


def make_validators(schemas: Iterable[Schema], count: Count, runtime: Runtime) -> Validators | None:
    """Return the validators of the active schemas, or None if there are none. For a log without a bus.

    Raises `ConfigInvalid` if the validation library is not installed.
    """
    checks = [
        Validator(each, compile_schema(each.expression, each.schema)) for each in active_schemas(schemas).values()
    ]
    return Validators(checks, count, Throttle(monotonic=runtime.monotonic), runtime) if checks else None


def active_schemas(versions: Iterable[Schema]) -> dict[str, Schema]:
    """Return the newest version of each expression, without removed schemas."""
    newest = {each.expression: each for each in sorted(versions, key=lambda each: (each.expression, each.version))}
    return {expression: each for expression, each in newest.items() if each.mode != REMOVED}


def _fields(schema: Schema, key: str, body: bytes, event: Event | None) -> dict[str, Any]:
    fields = {
        "key": key,
        "topic": key.rpartition("/")[2],
        "payload": body[:PAYLOAD_SHOWN_BYTES],
        "payload_bytes": len(body),
        "expected_hash": schema.hash,
        "expression": schema.expression,
        "mode": schema.mode,
    }
    if event is not None:
        fields |= {"offset": event.offset, "correlation_id": event.correlation}
    return fields
