"""The checks in force: which schemas a key has, and whether a payload fits them.

One object for each generation of the registry, made anew when a schema is registered or removed, so that what was
looked up for a key once is right for as long as the object lives. A bus without schemas has none of these, which is
all that publishing and reading look at.
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
from zbus.util.runtime import REAL

from .json_schema import Validate, compile_schema, reason_of

STRICT, PERMISSIVE, REMOVED = "strict", "permissive", "removed"
COUNTED = "invalid_schema"
KEYS_KEPT_MAX = 10_000
PAYLOAD_SHOWN_BYTES = 200

Count = Callable[[str, int], None]


class Validator(NamedTuple):
    """One schema in force, ready to check payloads."""

    schema: Schema
    validate: Validate


class Validators(Memo[str, tuple[Validator, ...]]):
    """Looked up by key: every check that its payloads must pass, the strict ones first."""

    def __init__(self, checks: Iterable[Validator], count: Count, throttle: Throttle) -> None:
        super().__init__(KEYS_KEPT_MAX, self._match)
        self._checks = sorted(checks, key=lambda check: check.schema.mode != STRICT)
        self._count, self._throttle = count, throttle

    def validate(self, key: str, body: bytes) -> None:
        """Before an event is stored: `SchemaInvalid` where a strict schema refuses it; others only note it."""
        for check in self[key]:
            try:
                check.validate(body)
            except Exception as error:  # a validator of the user's may raise anything
                self._violated(check, key, body, error, None)
                return  # counted once, however many it does not fit

    def validate_received(self, event: Event) -> None:
        """Before an event is handed to a reader: `SchemaInvalid` where a strict schema refuses it."""
        for check in self[event.key]:
            try:
                check.validate(event.payload)
            except Exception as error:
                self._violated(check, event.key, event.payload, error, event)
                return

    def first_reason(self, key: str, body: bytes) -> tuple[Schema, str] | None:
        """The first schema, whatever its mode, that a payload does not fit, and why; nothing is counted."""
        for check in self[key]:
            try:
                check.validate(body)
            except Exception as error:
                return check.schema, reason_of(error)
        return None

    def _match(self, key: str) -> tuple[Validator, ...]:
        return tuple(check for check in self._checks if matches(check.schema.expression, key))

    def _violated(self, check: Validator, key: str, body: bytes, error: Exception, event: Event | None) -> None:
        schema, reason = check.schema, reason_of(error)
        if event is None and schema.mode == STRICT:  # whoever publishes is told, and there is no event to speak of
            raise SchemaInvalid(key, schema.expression, reason, body, schema.hash) from error
        self._count(COUNTED, 1)
        if self._throttle.due(key):
            fields = _fields(schema, key, body, event)
            record_reason(EVENT_INVALID_SCHEMA, logging.WARNING, code=COUNTED, reason=reason, **fields)
        if schema.mode == STRICT:
            raise SchemaInvalid(key, schema.expression, reason, body, schema.hash, event) from error


def make_validators(schemas: Iterable[Schema], count: Count) -> Validators | None:
    """The checks of the newest of some versions, None where none is in force: for a log without a bus.

    Raises `ConfigInvalid` where the library that checks is not installed.
    """
    checks = [
        Validator(each, compile_schema(each.expression, each.schema)) for each in active_schemas(schemas).values()
    ]
    return Validators(checks, count, Throttle(monotonic=REAL.monotonic)) if checks else None


def active_schemas(versions: Iterable[Schema]) -> dict[str, Schema]:
    """Of all versions the newest of each expression, without those that were removed."""
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
