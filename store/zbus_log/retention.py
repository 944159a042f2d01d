"""Retention: removal of the oldest events by age, size and count, in small steps between commits."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from sqlalchemy import Connection

from zbus.ports.log import Cursor
from zbus.util.renamed import renamed_arguments

from .file.chain import keep_leaves
from .file.database import transaction
from .file.tables import BLOCK, get_low_water
from .read.reader import first_at
from .write import removed_identities

STEP = 4096


@renamed_arguments(
    age_s="max_age_s",
    size_bytes="max_bytes",
    events="max_events",
    past_cursors="ignore_cursors",
    upto="until",
)
class Rules(NamedTuple):
    """The events to keep: at most this age, size and number. None means no limit."""

    max_age_s: float | None = None
    max_bytes: int | None = None
    max_events: int | None = None
    ignore_cursors: bool = False  # whether events that a durable subscription has not acknowledged may be removed too
    until: int | None = None  # events up to this offset may be removed, whatever the other rules say

    def __bool__(self) -> bool:
        return any(rule is not None for rule in (self.max_age_s, self.max_bytes, self.max_events, self.until))


class Pruned(NamedTuple):
    """Result of retention: the new low-water mark, the number of events removed, and the cursor that limited it."""

    low_water: int
    removed: int
    held_by: str | None


def plan(connection: Connection, rules: Rules, head: int, lowest: Cursor | None) -> tuple[int, str | None]:
    """Return the offset up to which events may be removed, and the name of the cursor that limits it, if one does."""
    target = get_low_water(connection)
    if rules.max_events is not None:
        target = max(target, _by_count(connection, rules.max_events, head))
    if rules.max_age_s is not None:
        cutoff_ns = time.time_ns() - int(rules.max_age_s * 1e9)
        target = max(target, first_at(connection, cutoff_ns, head) - 1)
    if rules.max_bytes is not None:
        target = max(target, _by_size(connection, rules.max_bytes, head))
    if rules.until is not None:
        target = max(target, min(rules.until, head))
    if lowest is not None and lowest.offset < target and not rules.ignore_cursors:
        return lowest.offset, lowest.name
    return target, None


def trim_step(connection: Connection, target: int, dedup_s: float = 0.0) -> tuple[int, bool]:
    """Remove the oldest events, at most `STEP`. Returns how many, and whether any had to be removed.

    Their identities are remembered for `dedup_s` seconds.
    """
    low = get_low_water(connection)
    if low >= target:
        removed_identities.forget_expired(connection)
        return 0, False
    first = connection.exec_driver_sql("SELECT min(offset) FROM events").scalar()
    until = target if first is None else min(target, max(low, int(first) - 1) + STEP)
    with transaction(connection):
        keep_leaves(connection, until)
        removed_identities.remember(connection, until, dedup_s)
        connection.exec_driver_sql("UPDATE state SET low_water = ?", (until,))
        gone = connection.exec_driver_sql("DELETE FROM events WHERE offset <= ?", (until,)).rowcount
        # Remove the index rows of complete blocks too. The newest one stays, because it shows how far sealing is.
        newest = connection.exec_driver_sql("SELECT ifnull(max(block), 0) FROM blocks").scalar_one()
        whole = min((until + 1) // BLOCK, newest)
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


def _by_size(connection: Connection, max_bytes: int, head: int) -> int:
    """Return the offset up to which events must be removed to reach `max_bytes`, from the mean size of an event."""
    pages, free, page = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_count", "freelist_count", "page_size")
    )
    used, low = (pages - free) * page, get_low_water(connection)
    if used <= max_bytes or head <= low:
        return low
    return low + min(head - low, int((used - max_bytes) / (used / (head - low))) + 1)
