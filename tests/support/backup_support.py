"""What the tests of backups share: logs with some history, and everything that a log contains, to compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from log_support import append, raw, wait_until

from zbus.event import Event
from zbus.keys import KeySet
from zbus.ports.log import Row, Schema, Span
from zbus_log import SqliteLog

START_NS = 1_700_000_000_000_000_000
STEP_NS = 1_000_000_000


def rows(first: int, count: int, *, padding: int = 0, keys: int = 7, publishers: int = 3) -> list[Row]:
    """Events whose sequence and time follow from their number, the first one being `first`."""
    return [
        Row(
            100 + number % publishers,
            number,
            START_NS + number * STEP_NS,
            f"shop/{number % keys}/new",
            b"payload %d" % number + b"." * padding,
            b"",
        )
        for number in range(first, first + count)
    ]


def fill(log: SqliteLog, count: int, *, batch: int = 1000, padding: int = 0) -> int:
    """Append events after those that the log has; returns the new head."""
    head = log.head()
    for first in range(head + 1, head + count + 1, batch):
        append(log, rows(first, min(batch, head + count + 1 - first), padding=padding))
    return log.head()


def make_log(path: Path, events: int, *, durable: int | None = None) -> None:
    """A closed log with events, a schema, a position in another log and, if `durable` is given, a cursor there."""
    log = SqliteLog(str(path))
    try:
        if events:
            fill(log, events)
        log.schemas.store(Schema("shop/**", 1, "permissive", "abc", {"type": "object"}, START_NS))
        log.positions.store({"0000000000000abc": 12})
        if durable is not None:
            set_cursor(log, "billing", durable)
    finally:
        log.close(20.0)


def set_cursor(log: SqliteLog, name: str, offset: int) -> None:
    lease = log.cursors.claim(name, ["shop/**"], 0)
    done: list[Any] = []
    log.cursors.advance(name, lease.token, offset, done.append)
    wait_until(lambda: done)
    assert done == [None]
    log.cursors.release(name, lease.token)


def everything(path: Path) -> dict[str, Any]:
    """All that a log contains: events with their offsets, cursors, positions, schemas, incarnations and its digest."""
    log = SqliteLog(str(path), read_only=True)
    try:
        head = log.head()
        return {
            "head": head,
            "low_water": log.low_water(),
            "events": read(log),
            "cursors": [(each.name, each.offset, each.keys, each.incarnation) for each in log.cursors.list()],
            "positions": log.positions.load(),
            "schemas": list(log.schemas.load()),
            "digest": log.digest(head),
        }
    finally:
        log.close(5.0)


def read(log: SqliteLog) -> list[Event]:
    found: list[Event] = []
    head = log.head()
    after = log.low_water()
    while after < head:
        page = log.read(KeySet.all(), Span(after, head), 5000)
        events, error, _ = page.events()
        assert error is None
        found += events
        after = page.covered
    return found


def tables(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of every table of a file, apart from the description of a backup, in the order of their columns."""
    connection = raw(path)
    try:
        names = connection.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name != 'backup'"
        ).fetchall()
        return {name: sorted(connection.execute(f'SELECT * FROM "{name}"').fetchall(), key=repr) for (name,) in names}
    finally:
        connection.close()


def info(path: Path) -> dict[str, Any]:
    """What a backup says about itself."""
    connection = raw(path)
    try:
        found = connection.execute("SELECT cut, low_water, cold FROM backup").fetchone()
    finally:
        connection.close()
    return {"cut": found[0], "low_water": found[1], "cold": json.loads(found[2]) if found[2] else None}
