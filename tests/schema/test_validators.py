"""The validators of one key: strict schemas come before permissive ones, in whatever order they were registered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

import zbus
from zbus.event import Event
from zbus.observe.throttle import Throttle
from zbus.ports.log import Schema
from zbus.schema.validators import Validator, Validators, make_validators
from zbus.util.runtime import REAL

KEY = "shop/orders/created"
STRICT, PERMISSIVE = "shop/**", ("shop/*/created", "**")
SCHEMAS = [
    Schema(STRICT, 1, "strict", "1" * 32, {"required": ["id"]}, 0),
    *(Schema(each, 1, "permissive", "2" * 32, {"required": ["note"]}, 0) for each in PERMISSIVE),
]
IN_EVERY_ORDER = pytest.mark.parametrize("schemas", list(permutations(SCHEMAS)))


def reject(body: bytes) -> None:
    raise ValueError(body)


def made(schemas: Sequence[Schema], counted: list[str]) -> Validators:
    made = [Validator(each, reject) for each in schemas]
    return Validators(made, lambda name, _: counted.append(name), Throttle(), REAL)


@IN_EVERY_ORDER
def test_a_strict_schema_rejects_an_event_that_a_permissive_one_would_only_count(schemas: Sequence[Schema]) -> None:
    counted: list[str] = []
    validators = made(schemas, counted)

    with pytest.raises(zbus.SchemaInvalid) as caught:
        validators.validate(KEY, b"{}")
    assert caught.value.expected_hash == "1" * 32
    assert counted == []  # the event was not stored


@IN_EVERY_ORDER
def test_a_reader_receives_the_error_of_the_strict_schema(schemas: Sequence[Schema]) -> None:
    counted: list[str] = []
    event = Event(7, 0, 1, KEY, b"{}")

    with pytest.raises(zbus.SchemaInvalid) as caught:
        made(schemas, counted).validate_received(event)
    assert (caught.value.expected_hash, caught.value.event) == ("1" * 32, event)
    assert counted == ["invalid_schema"]


@IN_EVERY_ORDER
def test_the_first_reason_is_that_of_the_strict_schema(schemas: Sequence[Schema]) -> None:
    found = made(schemas, []).first_reason(KEY, b"{}")

    assert found is not None
    assert found[0].expression == STRICT


@IN_EVERY_ORDER
def test_validators_of_stored_schemas_are_strict_first_too(schemas: Sequence[Schema]) -> None:
    validators = make_validators(schemas, lambda name, events: None, REAL)

    assert validators is not None
    assert [each.schema.mode for each in validators[KEY]] == ["strict", "permissive", "permissive"]
    validators.validate(KEY, b'{"id": 1}')  # violates only permissive schemas
    with pytest.raises(zbus.SchemaInvalid):
        validators.validate(KEY, b'{"note": 1}')
