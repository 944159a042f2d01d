"""Key expressions as SQL conditions on the table of keys.

The table has a unique index on the name of a key, so the literal start of an expression is a range of
that index, and the number of keys that match is not important. A condition that is not exact lets
through some keys that do not match, never the other way round.
"""

from __future__ import annotations

from typing import NamedTuple

from zbus.keys import KEY_BYTES_MAX, KeySet

EXPRESSIONS_MAX = 100  # SQLite limits the depth of a condition
_AFTER_ANY = "\U0010ffff" * (KEY_BYTES_MAX // 4 + 1)


class Condition(NamedTuple):
    """A condition on `keys.key`, with its named values."""

    sql: str
    values: dict[str, str]
    exact: bool  # otherwise each key must be matched again


def condition_of(keys: KeySet) -> Condition:
    """Return the condition for the keys that match any expression of a set."""
    if len(keys.expressions) > EXPRESSIONS_MAX:
        return Condition("true", {}, False)
    parts, values, exact = [], dict[str, str](), True
    for number, expression in enumerate(keys.expressions):
        part = _condition(expression, f"key{number}")
        parts.append(f"({part.sql})")
        values |= part.values
        exact = exact and part.exact
    return Condition(f"({' OR '.join(parts)})", values, exact)


def _condition(expression: str, name: str) -> Condition:
    if "*" not in expression:
        return Condition(f"keys.key = :{name}", {name: expression}, True)
    if expression == "**":
        return Condition("instr('/' || keys.key, '/@') = 0", {}, True)
    literal = expression.removesuffix("/**")
    if "*" not in literal:  # it matches the literal itself too, and no segment after it that starts with '@'
        after = len(literal) + 1
        sql = (
            f"keys.key BETWEEN :{name} AND :{name}high AND substr(keys.key, {after}, 1) IN ('', '/')"
            f" AND instr(substr(keys.key, {after}), '/@') = 0"
        )
        return Condition(sql, {name: literal, f"{name}high": f"{literal}0"}, True)
    parts = [_ends_with(expression, f"{name}end")]
    prefix = expression.partition("*")[0].removesuffix("$")
    if prefix:
        values = {f"{name}low": prefix, f"{name}high": prefix + _AFTER_ANY}
        parts.append(Condition(f"keys.key >= :{name}low AND keys.key < :{name}high", values, False))
    sql = " AND ".join(part.sql for part in parts)
    return Condition(sql, {each: value for part in parts for each, value in part.values.items()}, False)


def _ends_with(expression: str, name: str) -> Condition:
    """Return the condition for the literal end of an expression: `**/c` matches `c` too, so without the slash."""
    end = expression.rpartition("*")[2].removeprefix("/")
    return Condition(f"substr(keys.key, {-len(end)}) = :{name}", {name: end}, False) if end else _ANY


_ANY = Condition("true", {}, False)
