"""Filters of `zbus monitor`: by header, by publisher and by payload."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import typer

from zbus.event import Event


class HeaderFilter(NamedTuple):
    """A header that an event must have, with this value or, if `value` is None, with any."""

    name: str
    value: str | None


class EventFilter:
    """A filter that an event passes if it has every header, one of the publishers, and a payload with the pattern.

    >>> from zbus import Event
    >>> wanted = EventFilter([HeaderFilter("tenant", "x")], [], re.compile("ca.*"))
    >>> wanted.passes(Event(1, 0, 0, "a/b", b"a cat", {"tenant": "x"})), wanted.passes(Event(1, 0, 0, "a/b", b"a cat"))
    (True, False)
    """

    def __init__(
        self, tags: Sequence[HeaderFilter], publishers: Sequence[int], pattern: re.Pattern[str] | None
    ) -> None:
        self._tags, self._publishers, self._pattern = tuple(tags), frozenset(publishers), pattern

    def passes(self, event: Event) -> bool:
        """Return whether the event passes the filter."""
        for name, value in self._tags:
            if name not in event.headers or (value is not None and event.headers[name] != value):
                return False
        if self._publishers and event.publisher_id not in self._publishers:
            return False
        return self._pattern is None or self._pattern.search(event.payload.decode(errors="replace")) is not None


def parse_tag(text: str) -> HeaderFilter:
    """Parse the value of `--header`.

    >>> parse_tag("tenant=x"), parse_tag("tenant")
    (HeaderFilter(name='tenant', value='x'), HeaderFilter(name='tenant', value=None))
    """
    name, given, value = text.partition("=")
    if not name:
        raise typer.BadParameter(f"{text!r} must be NAME=VALUE, or NAME for any value of the header")
    return HeaderFilter(name.lower(), value if given else None)


def parse_publisher(text: str) -> int:
    """Parse a publisher id: decimal or, as in log records, hexadecimal after 0x.

    >>> parse_publisher("255"), parse_publisher("0xff")
    (255, 255)
    """
    found = re.fullmatch(r"0x([0-9a-fA-F]{1,16})|([0-9]{1,20})", text, re.ASCII)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a publisher id such as 4711 or 0x1267")
    return int(found[1], 16) if found[1] else int(found[2])


def parse_pattern(text: str) -> re.Pattern[str]:
    """Parse a regular expression."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise typer.BadParameter(f"{text!r} is not a regular expression: {error}") from None
