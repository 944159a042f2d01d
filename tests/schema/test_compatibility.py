"""Compatibility: the new schema accepts every instance of the old one. Checked with generated schemas and instances."""

from __future__ import annotations

import copy
import json
from typing import Annotated, Any, Literal

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, RootModel

from zbus.schema.compatibility import DIALECT, differences

Node = dict[str, Any]
NAMES = ("a", "b", "c")

# Schemas, small and overlapping.

numbers = st.sampled_from([-2, 0, 1, 2.5, 3])
values = st.sampled_from([None, True, False, 0, 1, 2, 2.5, "", "a", "bb", "ccc", [], {}, [1], {"a": 1}])


def some(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Node]:
    return st.fixed_dictionaries({}, optional=optional)


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> Any:
    kinds = ["number", "integer", "string", "boolean", "null", "enum", "const", "any", "ref"]
    kinds += ["array", "array", "object", "object", "object", "anyOf", "oneOf", "allOf"] if depth else []
    kind = draw(st.sampled_from(kinds))
    inner = schemas(depth=depth - 1)
    if kind in ("number", "integer"):
        bounds = some(
            minimum=numbers, exclusiveMinimum=numbers, maximum=numbers, multipleOf=st.sampled_from([0.5, 1, 2])
        )
        return {"type": kind, **draw(bounds)}
    if kind == "string":
        return {"type": kind, **draw(some(minLength=st.integers(0, 3), maxLength=st.integers(1, 4)))}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": draw(st.lists(values, min_size=1, max_size=4))}
    if kind == "const":
        return {"const": draw(values)}
    if kind == "any":
        return draw(st.sampled_from([True, {}, {"type": ["string", "null"]}, {"type": ["integer", "object"]}]))
    if kind == "ref":
        return {"$ref": f"#/$defs/{draw(st.sampled_from(['X', 'Y']))}"}
    if kind == "array":
        more = some(
            items=inner,
            prefixItems=st.lists(inner, min_size=1, max_size=2),
            minItems=st.integers(0, 2),
            maxItems=st.integers(1, 3),
            uniqueItems=st.booleans(),
        )
        return {"type": "array", **draw(more)}
    if kind == "object":
        more = some(
            properties=st.dictionaries(st.sampled_from(NAMES), inner, min_size=1),
            required=st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
            additionalProperties=st.one_of(st.booleans(), inner),
            minProperties=st.integers(0, 2),
            maxProperties=st.integers(2, 3),
        )
        return {"type": "object", **draw(more)}
    return {kind: draw(st.lists(inner, min_size=1, max_size=3))}


@st.composite
def documents(draw: st.DrawFn) -> Node:
    root = draw(schemas())
    defs = {"X": draw(schemas(depth=1)), "Y": draw(schemas(depth=1))}
    return {**(root if isinstance(root, dict) else {}), "$defs": defs}


def places(node: Any) -> list[Node]:
    """Every object inside a schema."""
    if isinstance(node, dict):
        return [node, *(each for value in node.values() for each in places(value))]
    return [each for value in node for each in places(value)] if isinstance(node, list) else []


@st.composite
def changed(draw: st.DrawFn, old: Node) -> Node:
    """The old schema with one to three small changes, which loosen or tighten it."""
    new = copy.deepcopy(old)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(new)))
        keys = [key for key in place if key != "$defs"]
        how = draw(st.sampled_from(["drop", "replace", "add", "number", "optional"]))
        if how == "drop" and keys:
            del place[draw(st.sampled_from(keys))]
        elif how == "number":
            for key in keys:
                if isinstance(place[key], (int, float)) and not isinstance(place[key], bool):
                    place[key] = draw(st.sampled_from([0, 1, 2, 3]))
        elif how == "optional" and isinstance(place.get("properties"), dict):
            place["properties"][draw(st.sampled_from(NAMES))] = draw(schemas(depth=1))
        elif how == "replace" and keys:
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, bool)):
                place[key] = draw(st.one_of(schemas(depth=1), st.just({"anyOf": [place[key], {"type": "null"}]})))
            elif isinstance(place[key], list) and place[key]:
                place[key] = place[key] + [draw(st.sampled_from(place[key]))]
        else:
            addition = draw(schemas(depth=1))
            if isinstance(addition, dict):
                place.update(addition)
    return new


# Instances of a schema, with no properties but those that it names.


def instances(document: Node, node: Any, depth: int = 3) -> st.SearchStrategy[Any]:
    if depth < 0 or node is True:
        return values
    if node is False or not isinstance(node, dict):
        return st.nothing()
    ways = []
    if "$ref" in node:
        ways.append(instances(document, document["$defs"].get(node["$ref"].rpartition("/")[2], True), depth - 1))
    for key in ("anyOf", "oneOf", "allOf"):
        ways += [instances(document, each, depth - 1) for each in node.get(key, ())]
    if "enum" in node:
        ways.append(st.sampled_from(node["enum"]))
    if "const" in node:
        ways.append(st.just(node["const"]))
    types = node.get("type", [])
    for name in [types] if isinstance(types, str) else types:
        ways.append(_of_type(document, node, name, depth))
    return st.one_of(ways) if ways else values


def _of_type(document: Node, node: Node, name: str, depth: int) -> st.SearchStrategy[Any]:
    if name == "object":
        # As the module says: what no schema names is not sent, unless additionalProperties are spoken of.
        named = {key: instances(document, each, depth - 1) for key, each in node.get("properties", {}).items()}
        named |= {key: values for key in node.get("required", ()) if key not in named}
        more = node.get("additionalProperties", False)
        if more is not False:
            named |= {key: instances(document, more, depth - 1) for key in (*NAMES, "d") if key not in named}
        return st.fixed_dictionaries({}, optional=named)
    if name == "array":
        first = [instances(document, each, depth - 1) for each in node.get("prefixItems", [])]
        rest = st.lists(instances(document, node.get("items", True), depth - 1), max_size=3)
        return st.builds(lambda head, tail, cut: [*head, *tail][:cut], st.tuples(*first), rest, st.integers(0, 5))
    return {
        "integer": st.sampled_from([-3, -2, 0, 1, 2, 3, 4, 2.0]),
        "number": st.sampled_from([-3, -2, -2.5, 0, 0.5, 1, 2, 2.5, 3, 4]),
        "string": st.sampled_from(["", "a", "bb", "ccc", "dddd", "eeeee"]),
        "boolean": st.booleans(),
        "null": st.none(),
    }.get(name, st.nothing())


def compiled(schema: Node) -> Any:
    try:
        return jsonschema_rs.validator_for(schema)
    except ValueError:
        return None


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_what_a_compatible_schema_followed_is_accepted_by_the_one_that_follows(data: st.DataObject) -> None:
    old = data.draw(documents())
    new = data.draw(st.one_of(changed(old), changed(old), changed(old), documents()))
    before, after = compiled(old), compiled(new)
    assume(before is not None and after is not None)
    reasons = differences(old, new)
    event("compatible" if not reasons else "not compatible")
    if reasons:
        return
    for _ in range(8):
        instance = data.draw(instances(old, old))
        if before.is_valid(instance):
            event("an instance was validated against both")
            assert after.is_valid(instance), (old, new, instance)


def test_a_schema_is_compatible_with_itself_whatever_it_holds() -> None:
    exotic = {
        "$defs": {"T": {"type": "object", "properties": {"next": {"$ref": "#/$defs/T"}}}},
        "if": {"type": "string"},
        "then": {"pattern": "^a"},
        "not": {"const": 4},
        "unevaluatedProperties": False,
        "dependentSchemas": {"a": {"$ref": "#/$defs/T"}},
        "$dynamicRef": "#",
    }

    assert differences(exotic, {**exotic, "title": "another title"}) == []


# Single changes, through the models that people write.


class Old(BaseModel):
    id: int
    name: str = Field("", max_length=20)
    tags: list[str] = []
    kind: Literal["new", "used"] = "new"
    price: float = Field(0, ge=0)


class Line(BaseModel):
    sku: str
    part_of: Line | None = None


def schema_of(**fields: Any) -> Node:
    """The schema of `Old` with some fields changed."""
    from pydantic import create_model

    return create_model("New", __base__=Old, **fields).model_json_schema()


COMPATIBLE = {
    "an optional field more": {"note": (str | None, None)},
    "a wider type": {"id": (int | str, ...)},
    "a field that is optional now": {"id": (int, 0)},
    "a longer text": {"name": (str, Field("", max_length=40))},
    "one more alternative": {"kind": (Literal["new", "used", "broken"], "new")},
    "a bound less": {"price": (float, 0)},
    "null too": {"tags": (list[str] | None, None)},
    "a list of more": {"tags": (list[str | int], [])},
    "anything": {"name": (Any, "")},
}
REFUSED = {
    "a required field": ({"note": (str, ...)}, "$: now required: note"),
    "another type": ({"id": (str, ...)}, "$.id: type was integer, and is now string"),
    "a shorter text": ({"name": (str, Field("", max_length=5))}, "$.name: maxLength was 20, and is now 5"),
    "an alternative less": ({"kind": (Literal["new"], "new")}, "$.kind: const new was added"),
    "a bound more": ({"price": (float, Field(0, ge=0, le=9))}, "$.price: maximum 9 was added"),
    "a tighter bound": ({"price": (float, Field(0, gt=0))}, "$.price: exclusiveMinimum 0 was added"),
    "a list of less": ({"tags": (list[Literal["a"]], [])}, "$.tags[*]: const a was added"),
    "a pattern": ({"name": (str, Field("", max_length=20, pattern="^a"))}, "$.name: pattern ^a was added"),
}


@pytest.mark.parametrize("fields", COMPATIBLE.values(), ids=COMPATIBLE.keys())
def test_a_change_that_accepts_more_is_compatible(fields: dict[str, Any]) -> None:
    assert differences(Old.model_json_schema(), schema_of(**fields)) == []


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_change_that_accepts_less_is_reported_with_its_place(fields: dict[str, Any], reason: str) -> None:
    assert reason in differences(Old.model_json_schema(), schema_of(**fields))


def test_closing_a_schema_is_reported_for_each_property_that_goes_and_for_additional_ones() -> None:
    class New(BaseModel):
        model_config = ConfigDict(extra="forbid")
        id: int

    reasons = differences(Old.model_json_schema(), New.model_json_schema())

    assert "$.name: no longer accepted" in reasons
    assert "$: some additionalProperties are no longer accepted" in reasons


def test_a_new_property_is_no_exception_where_others_were_accepted_in_so_many_words() -> None:
    old = {"type": "object", "additionalProperties": True}
    new = {"type": "object", "additionalProperties": True, "properties": {"note": {"type": "string"}}}

    assert differences({"type": "object"}, new) == []
    assert differences(old, new) == ["$.note: type string was added"]


def test_what_a_reference_points_at_is_compared_and_recursion_ends() -> None:
    class Line2(BaseModel):
        sku: str
        part_of: Line2 | None = None
        amount: int = 1

    old, new = Line.model_json_schema(), json.loads(json.dumps(Line2.model_json_schema()))
    narrowed = copy.deepcopy(new)
    narrowed["$defs"]["Line2"]["properties"]["sku"] = {"type": "integer"}

    assert differences(old, new) == []
    assert differences(new, old) == []  # `amount` is not named any more, and others are accepted
    assert any("sku" in reason for reason in differences(old, narrowed))


class Created(BaseModel):
    kind: Literal["created"]
    id: int


class Paid(BaseModel):
    kind: Literal["paid"]
    amount: float


class Sent(BaseModel):
    kind: Literal["sent"]


def test_a_tagged_union_may_gain_an_alternative_and_not_lose_one() -> None:
    two = RootModel[Annotated[Created | Paid, Field(discriminator="kind")]].model_json_schema()
    three = RootModel[Annotated[Created | Paid | Sent, Field(discriminator="kind")]].model_json_schema()

    assert differences(two, three) == []
    assert differences(three, two)


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"},
        {"type": "object", "properties": {"a": {"$id": "urn:x", "type": "string"}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"$ref": "other.json"},
        {"type": "object", "unevaluatedProperties": False},
    ],
    ids=["another dialect", "an id inside", "itself without end", "outside", "unevaluated"],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(schema: Node) -> None:
    old = {"$schema": DIALECT, "type": "object"}

    assert differences(old, schema)


def test_a_comparison_takes_bounded_time() -> None:
    """Alternatives of alternatives multiply; the comparison then gives up."""
    old = {"allOf": [{"anyOf": [{"maximum": n}, {"minimum": m}]} for n in range(20) for m in range(3)]}

    (reason,) = differences(old, {"multipleOf": 7})

    assert "compared" in reason
