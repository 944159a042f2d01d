"""Retention: removal of the oldest events by age, size and count, in small steps between commits."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from sqlalchemy import Connection

from zbus.ports.log import Cursor

from .file.database import transaction
from .file.tables import BLOCK, get_low_water
from .read.reader import first_at

STEP = 4096


class Rules(NamedTuple):
    """The events to keep: at most this age, size and number. None means no limit."""

    age_s: float | None = None
    size_bytes: int | None = None
    events: int | None = None
    past_cursors: bool = False
    upto: int | None = None  # events up to this offset may be removed, whatever the other rules say

    def __bool__(self) -> bool:
        return any(rule is not None for rule in (self.age_s, self.size_bytes, self.events, self.upto))


class Pruned(NamedTuple):
    """Result of retention: the new low-water mark, the number of events removed, and the cursor that limited it."""

    low_water: int
    removed: int
    held_by: str | None


def plan(connection: Connection, rules: Rules, head: int, lowest: Cursor | None) -> tuple[int, str | None]:
    """Return the offset up to which events may be removed, and the name of the cursor that limits it, if one does."""
    target = get_low_water(connection)
    if rules.events is not None:
        target = max(target, _by_count(connection, rules.events, head))
    if rules.age_s is not None:
        cutoff_ns = time.time_ns() - int(rules.age_s * 1e9)
        target = max(target, first_at(connection, cutoff_ns, head) - 1)
    if rules.size_bytes is not None:
        target = max(target, _by_size(connection, rules.size_bytes, head))
    if rules.upto is not None:
        target = max(target, min(rules.upto, head))
    if lowest is not None and lowest.offset < target and not rules.past_cursors:
        return lowest.offset, lowest.name
    return target, None


def trim_step(connection: Connection, target: int) -> tuple[int, bool]:
    """Remove the oldest events, at most `STEP`. Returns how many, and whether any had to be removed."""
    low = get_low_water(connection)
    if low >= target:
        return 0, False
    first = connection.exec_driver_sql("SELECT min(offset) FROM events").scalar()
    upto = target if first is None else min(target, max(low, int(first) - 1) + STEP)
    with transaction(connection):
        connection.exec_driver_sql("UPDATE state SET low_water = ?", (upto,))
        gone = connection.exec_driver_sql("DELETE FROM events WHERE offset <= ?", (upto,)).rowcount
        # Remove the index rows of complete blocks too. The newest one stays, because it shows how far sealing is.
        newest = connection.exec_driver_sql("SELECT ifnull(max(block), 0) FROM blocks").scalar_one()
        whole = min((upto + 1) // BLOCK, newest)
        for table in ("by_key", "runs", "blocks"):
            connection.exec_driver_sql(f"DELETE FROM {table} WHERE block < ?", (whole,))
        connection.exec_driver_sql("DELETE FROM publishers WHERE last_block < ?", (whole,))
    driver: Any = connection.connection.dbapi_connection
    driver.execute("PRAGMA incremental_vacuum").fetchall()  # it frees one page per row; SQLAlchemy would fetch only one
    return gone, True


def _by_count(connection: Connection, events: int, head: int) -> int:
    """Return the offset before the newest `events` events; lost offsets do not count."""
    target = head - events
    while True:
        lost = connection.exec_driver_sql(
            "SELECT ifnull(sum(min(last, ?2) - max(first, ?1) + 1), 0) FROM losses WHERE first <= ?2 AND last >= ?1",
            (target + 1, head),
        ).scalar_one()
        if target == head - events - lost:
            return target
        target = head - events - lost


def _by_size(connection: Connection, size_bytes: int, head: int) -> int:
    """Return the offset up to which events must be removed to reach `size_bytes`, from the mean size of an event."""
    pages, free, page = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_count", "freelist_count", "page_size")
    )
    used, low = (pages - free) * page, get_low_water(connection)
    if used <= size_bytes or head <= low:
        return low
    return low + min(head - low, int((used - size_bytes) / (used / (head - low))) + 1)
