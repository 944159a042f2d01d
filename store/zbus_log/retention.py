"""Retention: removal of the oldest events by age, size and count, in small steps between commits."""

from __future__ import annotations

import time
from typing import NamedTuple

from sqlalchemy import Connection

from zbus.ports.log import Cursor
from zbus.util.renamed import renamed_arguments

from .file.chain import keep_leaves
from .file.database import changed_rows, free_pages, transaction
from .file.removed import drop_passed, has_removed, removed_after
from .file.tables import BLOCK, SEALED_UNTIL, get_low_water, get_state, set_state
from .write.removed_identities import UP_TO, RemovedIdentities

STEP = 4096
SAMPLE = 999  # of the newest events, to find out when they were published
FUTURE_NS = 60 * 1_000_000_000  # events are from the future if they are further ahead than clocks usually differ
ROW_BYTES_MIN = 24  # of a row of `events`, besides its headers and payload


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
    offloaded: bool = False  # whether the cold tier has the events up to `until`, so that it is missed if it is gone
    keys: tuple[tuple[str, float | None], ...] = ()  # ages for some key expressions, in place of `max_age_s`

    @property
    def every_events(self) -> int:
        """The number of new events after which retention runs, if the log has time for it."""
        return BLOCK if self.max_events is None else max(64, min(BLOCK, self.max_events // 16))

    def __bool__(self) -> bool:
        limits = (self.max_age_s, self.max_bytes, self.max_events, self.until, *[age_s for _, age_s in self.keys])
        return any(limit is not None for limit in limits)

    @property
    def longest_age_s(self) -> float | None:
        """The age above which no event is kept; None if some are kept whatever their age."""
        ages = [self.max_age_s, *[age_s for _, age_s in self.keys]]
        finite = [age_s for age_s in ages if age_s is not None]
        return max(finite) if len(finite) == len(ages) else None


class Pruned(NamedTuple):
    """Result of retention: the new low-water mark, the number of events removed, and the cursor that limited it."""

    low_water: int
    removed: int
    held_by: str | None


def plan(
    connection: Connection, rules: Rules, head: int, lowest: Cursor | None, now_ns: int | None = None
) -> tuple[int, str | None]:
    """Return the offset up to which events may be removed, and the name of the cursor that limits it, if one does.

    Ages are relative to `now_ns`, by default the current time.
    """
    target = get_low_water(connection)
    if rules.max_events is not None:
        target = max(target, _by_count(connection, rules.max_events, head))
    if rules.longest_age_s is not None:
        now_ns = time.time_ns() if now_ns is None else now_ns
        target = max(target, too_old_until(connection, rules.longest_age_s, now_ns))
    if rules.keys:  # what retention by key has removed completely
        target = max(target, removed_after(connection, target, STEP))
    if rules.max_bytes is not None:
        target = max(target, _by_size(connection, rules.max_bytes, head))
    if rules.until is not None:
        target = max(target, min(rules.until, head))
    if lowest is not None and lowest.offset < target and not rules.ignore_cursors:
        return lowest.offset, lowest.name
    return target, None


def trim_step(
    connection: Connection, target: int, identities: RemovedIdentities, offloaded_until: int = 0
) -> tuple[int, bool]:
    """Remove the oldest events, at most `STEP`. Returns how many, and whether any had to be removed.

    The cold tier has the events up to `offloaded_until`.
    """
    low = get_low_water(connection)
    if low >= target:
        identities.forget_expired()
        return 0, False
    first = connection.exec_driver_sql("SELECT min(offset) FROM events").scalar()
    until = target if first is None else min(target, max(low, int(first) - 1) + STEP)
    with transaction(connection):
        keep_leaves(connection, until)
        identities.remember(UP_TO, until)
        in_tier = max(get_state(connection).offloaded_until, min(until, offloaded_until))
        set_state(connection, low_water=until, offloaded_until=in_tier)
        connection.exec_driver_sql("DELETE FROM events WHERE offset <= ?", (until,))
        gone = changed_rows(connection)
        # Remove the index rows of complete blocks too. The newest one stays, because it shows how far sealing is.
        newest_sealed = connection.exec_driver_sql("SELECT ifnull(max(block), -1) FROM blocks").scalar_one()
        whole = min((until + 1) // BLOCK, max(0, newest_sealed))
        for table in ("by_key", "runs", "blocks"):
            connection.exec_driver_sql(f"DELETE FROM {table} WHERE block < ?", (whole,))
        connection.exec_driver_sql("DELETE FROM publishers WHERE last_block < ?", (whole,))
        drop_passed(connection, newest_sealed * BLOCK + BLOCK - 1)
    free_pages(connection)
    return gone, True


def newest_time_ns(connection: Connection) -> int | None:
    """Return when the newest events were published: the median, because the clock of one publisher may be wrong."""
    times = connection.exec_driver_sql(
        "SELECT published_at FROM (SELECT published_at FROM events ORDER BY offset DESC LIMIT ?) ORDER BY 1", (SAMPLE,)
    )
    found = [int(each) for each in times.scalars()]
    return found[len(found) // 2] if found else None


def too_old_until(connection: Connection, max_age_s: float, now_ns: int) -> int:
    """Return the last offset that is too old, in the order of offsets: everything before it was stored earlier.

    Events that were published in the future, by a clock that is wrong, are as old as the events around them: they go
    with an old event after them, and stay if the next one is young.
    """
    cutoff_ns, latest_ns = now_ns - int(max_age_s * 1e9), now_ns + FUTURE_NS
    young = _first_between(connection, cutoff_ns, latest_ns)
    found = connection.exec_driver_sql(
        "SELECT offset FROM events WHERE offset < ? AND published_at < ? ORDER BY offset DESC LIMIT 1",
        (1 << 62 if young is None else young, cutoff_ns),
    ).scalar()
    return 0 if found is None else int(found)


def _first_between(connection: Connection, from_ns: int, to_ns: int) -> int | None:
    """Return the lowest offset published between two times."""
    spans = connection.exec_driver_sql(
        "SELECT block FROM blocks WHERE published_max >= ? AND published_min <= ? ORDER BY block", (from_ns, to_ns)
    ).scalars()
    for block in spans.all():
        first = int(block) * BLOCK
        if (found := _between(connection, f"BETWEEN {first} AND {first + BLOCK - 1}", from_ns, to_ns)) is not None:
            return found
    return _between(connection, f"> {SEALED_UNTIL}", from_ns, to_ns)


def _between(connection: Connection, offsets: str, from_ns: int, to_ns: int) -> int | None:
    found = connection.exec_driver_sql(
        f"SELECT offset FROM events WHERE offset {offsets} AND published_at BETWEEN ? AND ? ORDER BY offset LIMIT 1",
        (from_ns, to_ns),
    ).scalar()
    return None if found is None else int(found)


def _by_count(connection: Connection, events: int, head: int) -> int:
    """Return the offset before the newest `events` events; lost and removed offsets do not count."""
    if not events:
        return head
    if has_removed(connection):
        return _before_newest(connection, events)
    target = head - events
    while True:
        lost = connection.exec_driver_sql(
            "SELECT ifnull(sum(min(last, ?2) - max(first, ?1) + 1), 0) FROM losses WHERE first <= ?2 AND last >= ?1",
            (target + 1, head),
        ).scalar_one()
        if target == head - events - lost:
            return target
        target = head - events - lost


def _before_newest(connection: Connection, events: int) -> int:
    """Return the offset before the newest `events` events, from the number of events in each block."""
    last, newer = 1 << 62, connection.exec_driver_sql(f"SELECT count(*) FROM events WHERE offset > {SEALED_UNTIL}")
    counted = int(newer.scalar_one())
    if counted < events:
        found = connection.exec_driver_sql(
            "SELECT block, counted - events FROM (SELECT block, events, sum(events) OVER (ORDER BY block DESC)"
            " AS counted FROM blocks) WHERE counted >= ? ORDER BY block DESC LIMIT 1",
            (events - counted,),
        ).one_or_none()
        if found is None:
            return 0
        last, events = int(found[0]) * BLOCK + BLOCK - 1, events - counted - int(found[1])
    oldest = connection.exec_driver_sql(
        "SELECT offset FROM events WHERE offset <= ? ORDER BY offset DESC LIMIT 1 OFFSET ?", (last, events - 1)
    ).scalar()
    return 0 if oldest is None else int(oldest) - 1


def _by_size(connection: Connection, max_bytes: int, head: int) -> int:
    """Return the offset up to which events must be removed to reach `max_bytes`, from the mean size of an event.

    The newest events, as many as one page of the file can have, stay: the file would not become smaller without them.
    """
    pages, free, page = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_count", "freelist_count", "page_size")
    )
    used, low = (pages - free) * page, get_low_water(connection)
    if used <= max_bytes or head <= low:
        return low
    last_page = connection.exec_driver_sql(
        "SELECT min(offset) FROM (SELECT offset, sum(length(payload) + ifnull(length(headers), 0) + ?2)"
        " OVER (ORDER BY offset DESC) AS size FROM (SELECT * FROM events ORDER BY offset DESC LIMIT ?1 / ?2))"
        " WHERE size <= ?1",
        (page, ROW_BYTES_MIN),
    ).scalar()
    stored = _count(connection) if has_removed(connection) else head - low
    surplus = int((used - max_bytes) / (used / max(1, stored))) + 1
    target = low + surplus
    if stored != head - low:
        found = connection.exec_driver_sql(
            "SELECT max(offset) FROM (SELECT offset FROM events ORDER BY offset LIMIT ?)", (min(surplus, STEP),)
        ).scalar()
        target = low if found is None else int(found)
    return max(low, min(target, head if last_page is None else int(last_page) - 1))


def _count(connection: Connection) -> int:
    """Return the number of events, from the number in each block."""
    tail = f"SELECT count(*) FROM events WHERE offset > {SEALED_UNTIL}"
    found = connection.exec_driver_sql(f"SELECT (SELECT ifnull(sum(events), 0) FROM blocks) + ({tail})")
    return int(found.scalar_one())
