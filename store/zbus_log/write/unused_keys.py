"""Removal of keys that have no event left, in small steps between commits.

The table of keys has no list of each key's events, because updating one would dirty a page per key. So
the keys in use are collected from the index of every block, and the others are removed. Without the
name of its key an event cannot be read, so the index of each block is proved first: in a block that is not
proved, the keys of the events are collected too. This takes longer the more events are left, and is worth it
only after a part of the events was removed.

The newest key always stays: SQLite derives the next id from it, and an id must never be used for
another key, because readers cache the names of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Connection

from zbus_log.file.block_index import ProvedBlocks
from zbus_log.file.database import free_pages, transaction
from zbus_log.file.tables import BLOCK, get_low_water

BLOCKS_PER_STEP = 32
KEYS_PER_STEP = 4096
WORTH_IT = 10  # remove keys once one event was removed for every ten that are left

_COLLECT = "INSERT OR IGNORE INTO temp.keys_in_use SELECT key FROM by_key WHERE block BETWEEN ?1 AND ?2"
_COLLECT_EVENTS = "INSERT OR IGNORE INTO temp.keys_in_use SELECT key FROM events WHERE offset BETWEEN ?1 AND ?2"
_COLLECT_TAIL = "INSERT OR IGNORE INTO temp.keys_in_use SELECT key FROM events WHERE offset > ?1"
_LAST_OF_STEP = "SELECT max(id) FROM (SELECT id FROM keys WHERE id > ?1 AND id < ?2 ORDER BY id LIMIT ?3)"
_REMOVE = """
DELETE FROM keys WHERE id > ?1 AND id <= ?2 AND id NOT IN (SELECT id FROM temp.keys_in_use) RETURNING key
"""


class UnusedKeys:
    """Counts removed events, and removes unused keys when that is due. Used by the writer's thread only."""

    def __init__(self, connection: Connection, forget: Callable[[Iterable[str]], None]) -> None:
        self._connection, self._forget = connection, forget
        self._removed = 0  # events removed since the keys in use were last collected
        self._block: int | None = None  # the next block to collect from; None: not collecting
        self._after = 0  # keys up to this id have been checked
        self._proved = ProvedBlocks()
        self._tail = 0  # the keys of events up to this offset have been collected

    def events_removed(self, events: int) -> None:
        """Take into account that events were removed."""
        self._removed += events

    def is_due(self, events_left: int, worth_it: int = WORTH_IT) -> bool:
        """Return whether `step` should be called: enough events were removed, or a removal is in progress."""
        return self._block is not None or self._removed * worth_it > events_left

    def look_for_more(self, events_left: int) -> None:
        """Make a removal due if there are more keys than events, because an earlier process may have left them."""
        keys = self._connection.exec_driver_sql("SELECT count(*) FROM keys").scalar_one()
        if keys > events_left + 1:
            self.events_removed(keys - events_left)

    def begin_anew(self) -> None:
        """Make a removal due now, even if one that began earlier is in progress."""
        self._begin()

    def step(self) -> bool:
        """Collect some keys in use, or remove some that are not. Returns whether there is more to do."""
        newest = int(self._ask("SELECT ifnull(max(block), -1) FROM blocks"))
        if self._block is None:
            self._begin()
        assert self._block is not None
        if self._block <= newest:
            last = min(newest, self._block + BLOCKS_PER_STEP - 1)
            self._collect(self._block, last)
            self._block, self._tail = last + 1, max(self._tail, last * BLOCK + BLOCK - 1)
            return True
        head = int(self._ask("SELECT ifnull(max(offset), 0) FROM events"))
        self._connection.exec_driver_sql(_COLLECT_TAIL, (self._tail,))  # with events that arrived since the last step
        self._tail = max(self._tail, head)
        newest_key = int(self._ask("SELECT ifnull(max(id), 0) FROM keys"))
        until = self._ask(_LAST_OF_STEP, self._after, newest_key, KEYS_PER_STEP)
        if until is None:
            self._connection.exec_driver_sql("DELETE FROM temp.keys_in_use")
            self._block = None
            return False
        with transaction(self._connection):
            names = self._connection.exec_driver_sql(_REMOVE, (self._after, until)).scalars().all()
        self._forget(names)
        free_pages(self._connection)
        self._after = until
        return True

    def _collect(self, first: int, last: int) -> None:
        """Collect the keys in use in some sealed blocks."""
        self._connection.exec_driver_sql(_COLLECT, (first, last))
        for block in range(first, last + 1):
            start, end = block * BLOCK, block * BLOCK + BLOCK - 1
            if self._proved.until(self._connection, start, end) < end:
                self._connection.exec_driver_sql(_COLLECT_EVENTS, (start, end))

    def _begin(self) -> None:
        self._connection.exec_driver_sql("PRAGMA temp_store=MEMORY")
        self._connection.exec_driver_sql("CREATE TEMP TABLE IF NOT EXISTS keys_in_use (id INTEGER PRIMARY KEY) STRICT")
        self._connection.exec_driver_sql("DELETE FROM temp.keys_in_use")
        self._proved = ProvedBlocks()  # anew: what is removed because of a damaged index is lost
        self._block = (get_low_water(self._connection) + 1) // BLOCK
        self._after = self._removed = self._tail = 0

    def _ask(self, statement: str, *values: Any) -> Any:
        return self._connection.exec_driver_sql(statement, values).scalar_one()
