"""Compatibility check: whether a new JSON Schema accepts every instance that an old one accepts, by structure.

The check is conservative: it reports everything that it cannot prove, and compares only JSON Schema 2020-12, which
pydantic writes. An empty result is therefore a guarantee, with one exception that every evolution of events needs: a
property that the old schema does not name, and that is optional in the new one, is assumed never to have been sent.
The exception does not apply if the old schema has `additionalProperties`, even if that is `true`.

Method: the facts known of an instance are a list of old schemas, all of which it satisfies. `$ref` and `allOf` extend
that list; an `anyOf` is checked branch by branch. Each keyword of the new schema must follow from these facts.
"""

from __future__ import annotations

from typing import Any

from .implications import (
    ANNOTATIONS,
    ANY,
    IMPLIES,
    GivenUp,
    Node,
    as_node,
    describe_change,
    facts_about,
    facts_at,
    is_nothing,
    mentions,
    resolve,
    types_of,
    value_key,
    values_of,
    without_annotations,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"
STEPS_MAX = 20_000
LOOKED_MAX = 1_000_000
DEPTH_MAX = 60
REASONS_MAX = 20

_RESOLVED = frozenset(("$ref", "allOf"))
# The types to which a keyword applies. It accepts every instance of another type.
_ABOUT = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "integer fraction"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems", "items", "prefixItems", "contains"), "array"),
    **dict.fromkeys(("required", "properties", "additionalProperties", "patternProperties"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties", "propertyNames"), "object"),
}
# Keywords that have a meaning only together.
_GROUPS = {
    "contains": ("contains", "minContains", "maxContains"),
    "if": ("if", "then", "else"),
    "then": ("if", "then", "else"),
    "else": ("if", "then", "else"),
    "minContains": ("contains", "minContains", "maxContains"),
    "maxContains": ("contains", "minContains", "maxContains"),
}
_UNRESOLVED = ("$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "$id", "$anchor")


def differences(old: Node, new: Node) -> list[str]:
    """Return why the new schema may reject instances that the old one accepts: a path and a reason each.

    >>> old = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
    >>> differences(old, {**old, "properties": {**old["properties"], "note": {"type": "string"}}})
    []
    >>> differences(old, {**old, "properties": {"id": {"type": "string"}}})
    ['$.id: type was integer, and is now string']
    """
    try:
        comparison = _Comparison(old, new)
        return list(dict.fromkeys(comparison.run()))[:REASONS_MAX]
    except GivenUp as error:
        return [str(error)]
    except RecursionError:
        return ["$: nested too deeply to be compared"]


class _Comparison:
    """One comparison, with a limit on its steps."""

    def __init__(self, old: Node, new: Node) -> None:
        self._old, self._new = old, new
        self._steps = self._looked = 0

    def run(self) -> list[str]:
        old, new = self._old, self._new
        if old.get("$schema", DIALECT) == new.get("$schema", DIALECT) and self._same(old, new, set()):
            return []
        for schema in (old, new):
            if schema.get("$schema", DIALECT).rstrip("#") != DIALECT:
                raise GivenUp(f"$: only JSON Schema 2020-12 is compared, not {schema['$schema']}")
            for keyword in _UNRESOLVED:
                if mentions(schema, keyword, at_root=keyword not in ("$id", "$anchor")):
                    raise GivenUp(f"$: schemas with {keyword} are not compared")
        return self._compare((old,), new, "$", frozenset(), 0)

    # The facts known of an instance are a conjunction of old schemas.

    def _compare(self, olds: tuple[Node, ...], new: Node, path: str, assumed: frozenset[Any], depth: int) -> list[str]:
        """Return why an instance that satisfies all of `olds` may not satisfy `new`."""
        self._steps += 1
        if self._steps > STEPS_MAX or depth > DEPTH_MAX:
            raise GivenUp(f"{path}: too deep or too large to be compared")
        if any(self._same(old, new, set()) for old in olds):
            return []
        known = [part for old in olds for part in self._parts(old, self._old)]
        if any(is_nothing(part) for part in known) or not types_of(known):
            return []  # no such instance exists
        # Check the alternatives one by one, unless the new schema has exactly the same ones.
        wanted = self._parts(new, self._new)
        split = next((at for at, part in enumerate(known) if "anyOf" in part or "oneOf" in part), None)
        if split is not None:
            keyword = "anyOf" if "anyOf" in known[split] else "oneOf"
            branches = known[split][keyword]
            wanted = [
                _without(part, keyword) if self._same(branches, part.get(keyword), set()) else part for part in wanted
            ]
            rest = _without(known[split], keyword)
            others = tuple(part for at, part in enumerate(known) if at != split)
            whole = {"allOf": wanted}
            found: list[str] = []
            for branch in branches:
                found += self._compare((*others, rest, as_node(branch)), whole, path, assumed, depth + 1)
            return found
        return [reason for part in wanted for reason in self._part(known, part, path, assumed, depth)]

    def _part(self, known: list[Node], part: Node, path: str, assumed: frozenset[Any], depth: int) -> list[str]:
        """Return the reasons for one new schema without `$ref` and `allOf`, keyword by keyword."""
        if is_nothing(part):
            return [f"{path}: no instance is accepted any more"]
        types = types_of(known)
        found: list[str] = []
        for keyword in part:
            about = _ABOUT.get(keyword)
            if keyword in ANNOTATIONS or keyword.startswith("x-") or (about and types.isdisjoint(about.split())):
                continue
            check = _STRUCTURAL.get(keyword)
            if check is not None:
                found += check(self, known, part, path, assumed, depth)
            elif keyword in IMPLIES:
                if not IMPLIES[keyword](known, part[keyword]):
                    found.append(f"{path}: {describe_change(known, keyword, part[keyword])}")
            elif not self._is_kept(known, part, keyword):
                found.append(f"{path}: {keyword} was added or changed, which cannot be compared")
        return found

    def _is_kept(self, known: list[Node], part: Node, keyword: str) -> bool:
        """Return whether an old schema has an identical keyword. Context-dependent keywords are never identical."""
        if keyword.startswith("unevaluated"):
            return False
        group = _GROUPS.get(keyword, (keyword,))
        return any(
            all((each in old) == (each in part) and self._same(old.get(each), part.get(each), set()) for each in group)
            for old in known
        )

    def _child(self, olds: tuple[Node, ...], new: Any, path: str, assumed: frozenset[Any], depth: int) -> list[str]:
        """Compare one level deeper in the instance. A comparison in progress is assumed to hold, to end recursion."""
        new = as_node(new)
        key = (frozenset(map(id, olds)), id(new))
        if key in assumed:
            return []
        return self._compare(olds or (ANY,), new, path, assumed | {key}, depth + 1)

    # Keywords that contain other schemas.

    def _any_of(self, known: list[Node], part: Node, path: str, assumed: frozenset[Any], depth: int) -> list[str]:
        tried = [self._compare(tuple(known), as_node(each), path, assumed, depth + 1) for each in part["anyOf"]]
        if any(not reasons for reasons in tried):
            return []
        return [f"{path}: no alternative accepts every instance that was accepted ({min(tried, key=len)[0]})"]

    def _one_of(self, known: list[Node], part: Node, path: str, assumed: frozenset[Any], depth: int) -> list[str]:
        branches = [as_node(each) for each in part["oneOf"]]
        for at, branch in enumerate(branches):
            others = branches[:at] + branches[at + 1 :]
            if all(self._disjoint(known, other) for other in others):
                reasons = self._compare(tuple(known), branch, path, assumed, depth + 1)
                if not reasons:
                    return []
        return [f"{path}: cannot prove that exactly one alternative accepts every instance that was accepted"]

    def _properties(self, known: list[Node], part: Node, path: str, assumed: frozenset[Any], depth: int) -> list[str]:
        found: list[str] = []
        for name, schema in part["properties"].items():
            facts = facts_about(known, name)
            if facts is not None:  # otherwise the old schema does not name it, and it was never sent
                found += self._child(facts, schema, f"{path}.{name}", assumed, depth)
        return found

    def _additional(self, known: list[Node], part: Node, path: str, assumed: frozenset[Any], depth: int) -> list[str]:
        schema = as_node(part["additionalProperties"])
        here = part.get("properties", {})
        found: list[str] = []
        for name in dict.fromkeys(name for old in known for name in old.get("properties", {}) if name not in here):
            reasons = self._child(facts_about(known, name) or (), schema, f"{path}.{name}", assumed, depth)
            found += [f"{path}.{name}: no longer accepted"] if reasons and is_nothing(schema) else reasons
        rest = tuple(
            as_node(old["additionalProperties"])
            for old in known
            if "additionalProperties" in old and "patternProperties" not in old
        )
        reasons = self._child(rest, schema, f"{path}.*", assumed, depth)
        if reasons:
            found.append(f"{path}: some additionalProperties are no longer accepted")
        return found

    def _items(self, known: list[Node], part: Node, path: str, assumed: frozenset[Any], depth: int) -> list[str]:
        """Compare `items` and `prefixItems` of the new schema together."""
        here = part.get("prefixItems", [])
        most = min([old["maxItems"] for old in known if "maxItems" in old], default=None)
        named = max([len(old.get("prefixItems", [])) for old in known] + [len(here)])
        found: list[str] = []
        for at in range(named + 1):  # the last index stands for all later items
            wanted = here[at] if at < len(here) else part.get("items", True)
            if most is not None and at >= most:
                break
            place = f"{path}[{at if at < named else '*'}]"
            found += self._child(facts_at(known, at), wanted, place, assumed, depth)
        return found

    def _prefix_items(self, known: list[Node], part: Node, path: str, assumed: frozenset[Any], depth: int) -> list[str]:
        return [] if "items" in part else self._items(known, part, path, assumed, depth)

    def _disjoint(self, known: list[Node], other: Node) -> bool:
        """Return whether no known instance satisfies `other`, by its type or by a required tag."""
        parts = self._parts(other, self._new)
        if any(is_nothing(part) for part in parts) or types_of(known).isdisjoint(types_of(parts)):
            return True
        if types_of(known) != {"object"}:
            return False
        for name in {name: None for old in known for name in old.get("required", ())}:
            mine = values_of([each for fact in facts_about(known, name) or () for each in self._parts(fact, self._old)])
            theirs = values_of(
                [each for part in parts if name in part.get("properties", {})
                 for each in self._parts(as_node(part["properties"][name]), self._new)]
            )  # fmt: skip
            if mine is not None and theirs is not None and mine.isdisjoint(theirs):
                return True
        return False

    # References.

    def _parts(self, node: Node, document: Node) -> list[Node]:
        """Return a schema as a conjunction of schemas without `$ref` and `allOf`."""
        found: list[Node] = []
        waiting, seen = [node], 0
        while waiting:
            each = waiting.pop()
            seen += 1
            if seen > STEPS_MAX // 100:
                raise GivenUp("$: the schema refers to itself without end")
            if "$ref" in each:
                waiting.append(resolve(each["$ref"], document))
            waiting += [as_node(part) for part in each.get("allOf", ())]
            rest = {k: v for k, v in each.items() if k not in _RESOLVED and k not in ANNOTATIONS}
            if rest:
                found.append(rest)
        return found

    def _same(self, old: Any, new: Any, seen: set[tuple[str, str]]) -> bool:
        """Return whether two schemas and their references are identical, apart from annotations such as titles."""
        self._looked += 1
        if self._looked > LOOKED_MAX:
            raise GivenUp("$: too large to be compared")
        if isinstance(old, dict) and isinstance(new, dict):
            mine, theirs = without_annotations(old), without_annotations(new)
            if mine.keys() != theirs.keys():
                return False
            for key, value in mine.items():
                if key in ("const", "enum") and value_key(value) != value_key(theirs[key]):
                    return False
                if key == "$ref" and isinstance(value, str) and isinstance(theirs[key], str):
                    if not self._same_target(value, theirs[key], seen):
                        return False
                elif not self._same(value, theirs[key], seen):
                    return False
            return True
        if isinstance(old, list) and isinstance(new, list):
            return len(old) == len(new) and all(self._same(a, b, seen) for a, b in zip(old, new, strict=True))
        return type(old) is type(new) and bool(old == new)

    def _same_target(self, old: str, new: str, seen: set[tuple[str, str]]) -> bool:
        if (old, new) in seen:
            return True  # already compared, or being compared
        seen.add((old, new))
        return self._same(resolve(old, self._old), resolve(new, self._new), seen)


_STRUCTURAL: dict[str, Any] = {
    "anyOf": _Comparison._any_of,
    "oneOf": _Comparison._one_of,
    "properties": _Comparison._properties,
    "additionalProperties": _Comparison._additional,
    "items": _Comparison._items,
    "prefixItems": _Comparison._prefix_items,
}


def _without(schema: Node, keyword: str) -> Node:
    return {key: value for key, value in schema.items() if key != keyword}
