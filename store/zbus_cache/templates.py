"""Templates: text with `{name}` fields, filled from a function's arguments or from an event's key.

In a key expression, a field is a segment or the middle of one, and `**` may only come last. So each field has exactly
one position in a key, and the entries that an event names are unambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

from zbus import ConfigInvalid, Event, KeyInvalid
from zbus.keys import check_expression, check_key

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def fields_of(template: str, field: str, names: Iterable[str]) -> list[str]:
    """Return the fields of a template. Raises `ConfigInvalid` if a field does not start with one of `names`.

    >>> fields_of("todo/{todo.id}/{lang}", "key", ["todo", "lang", "force"])
    ['todo.id', 'lang']
    """
    try:
        parts = [each for each in Formatter().parse(template) if each[1] is not None]
    except ValueError as error:
        raise ConfigInvalid(field, f"{template!r} is not a valid template: {error}") from None
    known = list(names)
    for _, name, spec, conversion in parts:
        if not _NAME.fullmatch(name or "") or spec or conversion:
            raise ConfigInvalid(field, f"{template!r}: a field must be {{name}} or {{name.attribute}}")
        if str(name).partition(".")[0] not in known:
            available = f"available: {', '.join(known)}" if known else "no fields are available"
            raise ConfigInvalid(field, f"{template!r}: unknown field {name!r}; {available}")
    return [str(name) for _, name, _, _ in parts]


class KeyTemplate:
    """A key expression with fields: the keys that it matches, and the texts of its fields in each key.

    >>> template = KeyTemplate("events/Todo-{id}/*/{what}/**")
    >>> template.expression, template.names, template.read("events/Todo-7/x/done/y")
    ('events/Todo-$*/*/*/**', ('id', 'what'), ('7', 'done'))
    """

    def __init__(self, template: str) -> None:
        if not isinstance(template, str):
            raise KeyInvalid(template, f"a key expression is text, not {type(template).__name__}")
        self.template = template
        self.names: tuple[str, ...] = ()
        self._fields: list[tuple[int, int, int]] = []  # index of the segment, lengths of its prefix and suffix
        segments = template.split("/")
        for at, segment in enumerate(segments):
            if "{" in segment or "}" in segment:
                segments[at] = self._parse_field(at, segment)
        if self.names and "**" in segments[:-1]:
            raise KeyInvalid(template, "with {fields}, '**' may only be the last segment")
        self.expression = check_expression("/".join(segments))

    def _parse_field(self, at: int, segment: str) -> str:
        first, opened, rest = segment.partition("{")
        name, closed, last = rest.partition("}")
        if not (opened and closed and _NAME.fullmatch(name)) or re.search(r"[{}*$]", first + last):
            reason = "a segment may contain one {name} or {name.attribute}, and no wildcard beside it"
            raise KeyInvalid(self.template, reason)
        self.names += (name,)
        self._fields.append((at, len(first), len(last)))
        return f"{first}$*{last}" if first or last else "*"

    def read(self, key: str) -> tuple[str, ...]:
        """Return the texts of the fields in a key that matches."""
        segments = key.split("/")
        return tuple([segments[at][first : len(segments[at]) - last] for at, first, last in self._fields])

    def write(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the texts of the fields for these arguments. Raises `KeyInvalid` if a text cannot be part of a key."""
        texts = tuple([format(_value(values, name)) for name in self.names])
        for name, text in zip(self.names, texts, strict=True):
            if "/" in text:
                raise KeyInvalid(text, f"{name!r} of {self.template!r} must be one segment of a key")
            check_key(text)
        return texts


def entry_of(expression: KeyTemplate, template: str) -> Callable[[Event], str]:
    """Return a function that builds the key of an entry from the fields of an event's key."""
    if not fields_of(template, "entry", expression.names):
        raise ConfigInvalid("entry", f"{template!r} has no field: the entry to invalidate must depend on the event")
    if any("." in name for name in expression.names):
        raise ConfigInvalid("invalidate_on", f"{expression.template!r}: fields of an event's key must be plain names")
    return lambda event: template.format_map(dict(zip(expression.names, expression.read(event.key), strict=True)))


def _value(values: Mapping[str, Any], name: str) -> Any:
    first, *attributes = name.split(".")
    value = values[first]
    for attribute in attributes:
        value = getattr(value, attribute)
    return value
