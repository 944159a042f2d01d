"""Purges: the removal of all events of some keys, whatever their age, because a user asked for it.

A purge is recorded in the table `purges` when it begins, and the number of removed events with each step. A process
that is killed leaves a purge that is not finished; doing it again removes the rest.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection

from zbus.keys import KeySet
from zbus.ports.log import Cursor
from zbus_log.cold.tier import Cold

from .file.database import log_errors, snapshot, transaction
from .file.tables import BLOCK, LINEAGE_SINCE, file_version, get_head, get_low_water
from .read.reader import SqliteReader, readable
from .write.cursors import SqliteCursors
from .write.removal import Removal

BLOCKS_PER_STEP = 64  # that have no event to remove


class PurgeRecord(NamedTuple):
    """A row of `purges`."""

    started_at_ns: int
    finished_at_ns: int | None  # None: it continues, or its process was killed
    expressions: tuple[str, ...]
    until: int
    events: int


class Preview(NamedTuple):
    """The events that a purge would remove."""

    events: int
    first: int  # offset; 0 if there is none
    last: int
    unacknowledged: tuple[str, ...]  # the durable subscriptions that have not acknowledged all of them
    offloaded_until: int  # the last offset in the cold tier, from which nothing is removed; 0 if there is no tier


class Purge:
    """One purge, step by step. Used by the writer's thread only."""

    def __init__(self, connection: Connection, removal: Removal, keys: KeySet, head: int) -> None:
        self._connection, self._removal, self._keys, self.until = connection, removal, keys, head
        self._block = (get_low_water(connection) + 1) // BLOCK
        self._id = 0
        self.removed, self.is_done = 0, False

    def step(self) -> None:
        """Remove the events of one block, or examine some blocks without such events."""
        if not self._id:
            self._begin()
        for _ in range(BLOCKS_PER_STEP):
            if self._block * BLOCK > self.until:
                self._update("finished_at = ?2", time.time_ns())
                self._connection.exec_driver_sql("PRAGMA secure_delete=FAST").close()
                self.is_done = True
                return
            chosen = self._removal.choose(self._block, self.until, lambda name: name not in self._keys)
            self._block += 1
            if chosen.offsets:
                count = partial(self._update, "events = events + ?2", len(chosen.offsets))
                self.removed += self._removal.remove(chosen, count)
                return

    def _begin(self) -> None:
        # Overwrite pages that become free too: a copy of the file would have them.
        self._connection.exec_driver_sql("PRAGMA secure_delete=ON").close()
        values = (time.time_ns(), json.dumps(self._keys.expressions), self.until)
        with transaction(self._connection):
            self._id = self._connection.exec_driver_sql(
                "INSERT INTO purges (started_at, expressions, until, events) VALUES (?, ?, ?, 0) RETURNING id", values
            ).scalar_one()

    def _update(self, change: str, value: int) -> None:
        self._connection.exec_driver_sql(f"UPDATE purges SET {change} WHERE id = ?1", (self._id, value))


def read_purges(connection: Connection) -> list[PurgeRecord]:
    """Return the purges of a log, the oldest first."""
    if file_version(connection) < LINEAGE_SINCE:
        return []
    found = connection.exec_driver_sql(
        "SELECT started_at, finished_at, expressions, until, events FROM purges ORDER BY id"
    )
    return [PurgeRecord(row[0], row[1], tuple(json.loads(row[2])), row[3], row[4]) for row in found]


def preview(path: str, keys: KeySet, cold: str | None = None) -> Preview:
    """Return what a purge of these keys would remove now. Changes nothing."""
    engine = readable(path)
    cursors, tier = SqliteCursors(path), Cold(f"{path}-cold" if cold is None else cold)
    try:
        choice = SqliteReader(path, engine).choose(keys)
        with log_errors(path), engine.connect() as connection, snapshot(connection):
            values: dict[str, Any] = {
                **choice.values,
                "after": get_low_water(connection),
                "until": get_head(connection),
                "from_ns": -1,
                "to_ns": (1 << 63) - 1,
                "limit": -1,
            }
            chosen = choice.statement.format(columns="events.offset, events.key")
            found = connection.exec_driver_sql(
                f"{choice.first.format(timed='')} SELECT keys.key, count(*), min(offset), max(offset)"
                f" FROM ({chosen}) AS chosen JOIN keys ON keys.id = chosen.key GROUP BY chosen.key",
                values,
            ).all()
        # The statement for many keys lets through some that do not match.
        listed = [tuple(row) for row in found]
        matching = [row for row in listed if row[0] in keys]
        behind = [each.name for each in cursors.list() if _lacks(each, matching)]
        return Preview(
            sum(row[1] for row in matching),
            min((row[2] for row in matching), default=0),
            max((row[3] for row in matching), default=0),
            tuple(behind),
            tier.manifest().last,
        )
    finally:
        cursors.close(1.0)
        tier.close()
        engine.dispose()


def _lacks(cursor: Cursor, events: list[Any]) -> bool:
    if cursor.expired_at_ns is not None or not cursor.keys:
        return False
    wanted = KeySet(cursor.keys)
    return any(row[3] > cursor.offset and row[0] in wanted for row in events)
