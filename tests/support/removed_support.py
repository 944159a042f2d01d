"""Helpers for tests of removed events: a log whose keys take turns, and the events that should be left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from log_support import append, ask, wait_until

from zbus.keys import KeySet
from zbus.ports.log import Log, Row, Span
from zbus_log import SqliteLog, verify

KEYS = ("shop/orders", "telemetry/cpu", "telemetry/disk/a", "audit/login")
PAGE = 1500


def key_of(offset: int) -> str:
    """The key of an event: the keys take turns."""
    return KEYS[offset % len(KEYS)]


def row(offset: int, at_ns: int | None = None) -> Row:
    """The event at an offset of a log that has only such events. Three publishers take turns."""
    at_ns = 1_700_000_000_000_000_000 + offset * 1_000_000 if at_ns is None else at_ns
    return Row(10 + offset % 3, offset, at_ns, key_of(offset), b"payload %d" % offset, None)


def fill(log: SqliteLog, count: int, at_ns: int | None = None) -> None:
    """Append events, and wait until each full block is sealed."""
    head = log.head()
    for first in range(head + 1, head + count + 1, 1000):
        append(log, [row(offset, at_ns) for offset in range(first, min(first + 1000, head + count + 1))])
    wait_until(lambda: ask(log.path, "SELECT ifnull(max(block), -1) FROM blocks") == (log.head() + 1) // 4096 - 1)


def offsets(log: Log, expressions: Sequence[str] = (), span: Span | None = None) -> list[int]:
    """Every offset that a replay gives, each with the event that was stored there."""
    keys = KeySet(expressions) if expressions else KeySet.all()
    found: list[int] = []
    span = log.narrow(span or Span())
    assert span.until is not None
    while span.after < span.until:
        page = log.read(keys, span, PAGE)
        events, error, skipped = page.events()
        assert (error, skipped) == (None, 0)
        assert all(
            (event.key, event.payload) == (key_of(event.offset), b"payload %d" % event.offset) for event in events
        )
        assert page.covered > span.after
        found += [event.offset for event in events]
        span = span._replace(after=page.covered)
    return found


def kept(until: int, is_kept: Callable[[str], bool], first: int = 1) -> list[int]:
    return [offset for offset in range(first, until + 1) if is_kept(key_of(offset))]


def check(path: str | Path, removed: int) -> None:
    """Nothing is wrong with a log, and this many events were removed from its middle."""
    report = verify(str(path))
    assert report.problems == []
    assert report.removed == removed


def now_ns(minutes_ago: float = 0.0) -> int:
    return time.time_ns() - int(minutes_ago * 60e9)
