"""Facts that follow from a list of JSON Schemas together: types, values, bounds, and facts about a property or item.

`compatibility` builds on these functions. Each list is a conjunction: the instance satisfies all of its schemas, which
contain no `$ref` and no `allOf`.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

Node = dict[str, Any]

# Keywords that accept every instance.
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("$comment", "$schema", "$defs", "definitions", "$anchor", "$id"),
    )
)
_TYPES = {
    "null": {"null"},
    "boolean": {"boolean"},
    "integer": {"integer"},
    "number": {"integer", "fraction"},
    "string": {"string"},
    "array": {"array"},
    "object": {"object"},
}
_ALL_TYPES = frozenset[str]().union(*_TYPES.values())
ANY: dict[str, Any] = {}
NOTHING: dict[str, Any] = {"not": {}}


class GivenUp(Exception):
    """Raised when the schemas cannot be compared; the argument is the reason."""


# Keywords with values: whether the known facts imply them.


def _implies_type(known: list[Node], value: Any) -> bool:
    return types_of(known) <= types_of([{"type": value}])


def _implies_enum(known: list[Node], values: Any) -> bool:
    mine = values_of(known)
    return mine is not None and mine <= {value_key(each) for each in values}


def _lowest(known: list[Node]) -> tuple[Fraction, bool] | None:
    """Return the strongest lower bound, and whether the bound itself is excluded."""
    bounds = [(_number(old["minimum"]), False) for old in known if "minimum" in old]
    bounds += [(_number(old["exclusiveMinimum"]), True) for old in known if "exclusiveMinimum" in old]
    return max(bounds, default=None)


def _highest(known: list[Node]) -> tuple[Fraction, bool] | None:
    bounds = [(_number(old["maximum"]), False) for old in known if "maximum" in old]
    bounds += [(_number(old["exclusiveMaximum"]), True) for old in known if "exclusiveMaximum" in old]
    return min(bounds, key=lambda bound: (bound[0], not bound[1]), default=None)


def _at_least(known: list[Node], value: Any, exclusive: bool) -> bool:
    bound = _lowest(known)
    return bound is not None and (bound[0] > _number(value) or (bound[0] == _number(value) and bound[1] >= exclusive))


def _at_most(known: list[Node], value: Any, exclusive: bool) -> bool:
    bound = _highest(known)
    return bound is not None and (bound[0] < _number(value) or (bound[0] == _number(value) and bound[1] >= exclusive))


def _is_multiple(known: list[Node], value: Any) -> bool:
    return any((_number(old["multipleOf"]) / _number(value)).denominator == 1 for old in known if "multipleOf" in old)


def _floor(keyword: str) -> Any:
    return lambda known, value: value <= 0 or any(old[keyword] >= value for old in known if keyword in old)


def _ceiling(keyword: str) -> Any:
    return lambda known, value: any(old[keyword] <= value for old in known if keyword in old)


def _equal(keyword: str) -> Any:
    return lambda known, value: any(old[keyword] == value for old in known if keyword in old)


IMPLIES: dict[str, Any] = {
    "type": _implies_type,
    "enum": _implies_enum,
    "const": lambda known, value: _implies_enum(known, [value]),
    "minimum": lambda known, value: _at_least(known, value, False),
    "exclusiveMinimum": lambda known, value: _at_least(known, value, True),
    "maximum": lambda known, value: _at_most(known, value, False),
    "exclusiveMaximum": lambda known, value: _at_most(known, value, True),
    "multipleOf": _is_multiple,
    "uniqueItems": lambda known, value: not value or any(old.get("uniqueItems") for old in known),
    "required": lambda known, value: set(value) <= {name for old in known for name in old.get("required", ())},
    **{name: _floor(name) for name in ("minLength", "minItems", "minProperties")},
    **{name: _ceiling(name) for name in ("maxLength", "maxItems", "maxProperties")},
    **{name: _equal(name) for name in ("pattern", "format")},
}


def describe_change(known: list[Node], keyword: str, value: Any) -> str:
    """Return the old and the new value of a keyword, as text."""
    if keyword == "required":
        required = {name for old in known for name in old.get("required", ())}
        return f"now required: {', '.join(name for name in value if name not in required)}"
    before = [old[keyword] for old in known if keyword in old]
    if not before:
        return f"{keyword} {_shown(value)} was added"
    return f"{keyword} was {_shown(before[0])}, and is now {_shown(value)}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:79] + "…"


# Facts about schemas.


def as_node(schema: Any) -> Node:
    """Return a schema as an object, also for `true` and `false`."""
    if schema is True:
        return ANY
    if schema is False:
        return NOTHING
    if not isinstance(schema, dict):
        raise GivenUp("$: a schema must be an object, true or false")
    return schema


def is_nothing(part: Node) -> bool:
    """Return whether a schema provably accepts nothing."""
    return part.get("not") in ({}, True) and isinstance(part.get("not"), (dict, bool))


def types_of(known: list[Node]) -> frozenset[str]:
    """Return the types of instances that can satisfy all of these schemas."""
    left = _ALL_TYPES
    for part in known:
        if "type" in part:
            names = part["type"] if isinstance(part["type"], list) else [part["type"]]
            left &= frozenset[str]().union(*(_TYPES.get(name, set()) for name in names))
        if "enum" in part:
            left &= {_type_of(value) for value in part["enum"]}
        if "const" in part:
            left &= {_type_of(part["const"])}
    return left


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def values_of(known: list[Node]) -> set[str] | None:
    """Return the only possible values if enum or const restrict them, else None."""
    sets = [{value_key(each) for each in part["enum"]} for part in known if "enum" in part]
    sets += [{value_key(part["const"])} for part in known if "const" in part]
    return set.intersection(*sets) if sets else None


def value_key(value: Any) -> str:
    """Return the same text for values that are equal in JSON Schema: 1 and 1.0 are equal, 1 and true are not."""

    def plain(each: Any) -> Any:
        if isinstance(each, float) and each.is_integer():
            return int(each)
        if isinstance(each, list):
            return [plain(one) for one in each]
        return {name: plain(one) for name, one in each.items()} if isinstance(each, dict) else each

    return json.dumps(plain(value), sort_keys=True)


def _number(value: Any) -> Fraction:
    return Fraction(str(value))


def facts_about(known: list[Node], name: str) -> tuple[Node, ...] | None:
    """Return the facts about a property, or None if the old schema neither names it nor restricts other properties."""
    found: list[Node] = []
    named = False
    for old in known:
        if name in old.get("properties", {}):
            found.append(as_node(old["properties"][name]))
        elif "patternProperties" in old:
            named = True  # a pattern may match it, so nothing is known
        elif "additionalProperties" in old:
            found.append(as_node(old["additionalProperties"]))
        named = named or name in old.get("required", ())
    return tuple(found) if found or named else None


def facts_at(known: list[Node], at: int) -> tuple[Node, ...]:
    """Return the facts about one item of an array."""
    found: list[Node] = []
    for old in known:
        prefix = old.get("prefixItems", [])
        if at < len(prefix):
            found.append(as_node(prefix[at]))
        elif "items" in old:
            found.append(as_node(old["items"]))
    return tuple(found)


def without_annotations(schema: Node) -> Node:
    """Return a schema without annotations. One with an object as value may be a property of that name, and stays."""
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS or isinstance(value, dict)}


def mentions(value: Any, keyword: str, at_root: bool) -> bool:
    """Return whether a keyword is anywhere in a schema. The name of a property also counts, which is harmless."""
    if isinstance(value, dict):
        return (at_root and keyword in value) or any(mentions(each, keyword, True) for each in value.values())
    return isinstance(value, list) and any(mentions(each, keyword, True) for each in value)


def resolve(reference: str, document: Node) -> Node:
    """Return the target of a local reference. Raises `GivenUp` if it is not in the document."""
    target: Any = document
    if reference != "#" and not reference.startswith("#/"):
        raise GivenUp(f"$: {reference} does not point into the schema itself")
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(step)] if isinstance(target, list) else target[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise GivenUp(f"$: {reference} is not in the schema") from None
    return as_node(target)
