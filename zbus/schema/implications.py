"""What a list of JSON Schemas says together: their types, values, bounds, and what they know of a property or item.

The small truths on which the comparison in `compatible` stands. Each list is a conjunction: an instance that is spoken
of satisfies all of its schemas, which hold no `$ref` and no `allOf` any more.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

Node = dict[str, Any]

# Keywords that refuse nothing.
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
    """The schemas cannot be compared; the reason is the argument."""


# Keywords that hold values: whether what is known implies them.


def _implies_type(known: list[Node], value: Any) -> bool:
    return types_of(known) <= types_of([{"type": value}])


def _implies_enum(known: list[Node], values: Any) -> bool:
    mine = values_of(known)
    return mine is not None and mine <= {value_key(each) for each in values}


def _lowest(known: list[Node]) -> tuple[Fraction, bool] | None:
    """The strongest lower bound, and whether the bound itself is excluded."""
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
    """What a keyword was, and what it is now."""
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


# Small truths about schemas.


def as_node(schema: Any) -> Node:
    """A schema as an object; there is one for `true` and one for `false`."""
    if schema is True:
        return ANY
    if schema is False:
        return NOTHING
    if not isinstance(schema, dict):
        raise GivenUp("$: a schema that is neither an object nor true or false")
    return schema


def is_nothing(part: Node) -> bool:
    """Whether a schema surely accepts nothing."""
    return part.get("not") in ({}, True) and isinstance(part.get("not"), (dict, bool))


def types_of(known: list[Node]) -> frozenset[str]:
    """Which types are possible where all of these are satisfied."""
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
    """The only values that are possible, where enum or const say so."""
    sets = [{value_key(each) for each in part["enum"]} for part in known if "enum" in part]
    sets += [{value_key(part["const"])} for part in known if "const" in part]
    return set.intersection(*sets) if sets else None


def value_key(value: Any) -> str:
    """The same text for values that JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""

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
    """What is known of a property; None where the old schema does not name it, and says nothing of others either."""
    found: list[Node] = []
    named = False
    for old in known:
        if name in old.get("properties", {}):
            found.append(as_node(old["properties"][name]))
        elif "patternProperties" in old:
            named = True  # one of them may be about it: nothing is known
        elif "additionalProperties" in old:
            found.append(as_node(old["additionalProperties"]))
        named = named or name in old.get("required", ())
    return tuple(found) if found or named else None


def facts_at(known: list[Node], at: int) -> tuple[Node, ...]:
    """What is known of one item of an array."""
    found: list[Node] = []
    for old in known:
        prefix = old.get("prefixItems", [])
        if at < len(prefix):
            found.append(as_node(prefix[at]))
        elif "items" in old:
            found.append(as_node(old["items"]))
    return tuple(found)


def without_annotations(schema: Node) -> Node:
    """Without annotations. One whose value is an object may be a property of that name, and stays."""
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS or isinstance(value, dict)}


def mentions(value: Any, keyword: str, at_root: bool) -> bool:
    """Whether a keyword is anywhere in a schema; as a property's name it counts too, which does no harm."""
    if isinstance(value, dict):
        return (at_root and keyword in value) or any(mentions(each, keyword, True) for each in value.values())
    return isinstance(value, list) and any(mentions(each, keyword, True) for each in value)


def resolve(reference: str, document: Node) -> Node:
    """What a local reference points at."""
    target: Any = document
    if reference != "#" and not reference.startswith("#/"):
        raise GivenUp(f"$: {reference} is no place in the schema itself")
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(step)] if isinstance(target, list) else target[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise GivenUp(f"$: {reference} is not in the schema") from None
    return as_node(target)
