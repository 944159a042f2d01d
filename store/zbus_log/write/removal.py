"""Removal of events from the middle of the log: those of some keys in one block, in one transaction.

The offsets and the checksums of the events stay (see `file/removed.py`). The index of a sealed block is written again
without them, from the index itself and not from the events: an event that was damaged since must not leave it. So the
block must be proved first. Its digest, and the times and sequences that it spans, stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from zbus.errors import LogDamaged
from zbus_log.file.block_index import UNPROVABLE, ProvedBlocks, block_rows, store_checksums
from zbus_log.file.database import free_pages, transaction
from zbus_log.file.key_table import KeyTable
from zbus_log.file.removed import store_removed
from zbus_log.file.tables import BLOCK, get_low_water, get_state, set_state

from .removed_identities import LISTED, RemovedIdentities
from .writer import Writer

_index = msgspec.json.Decoder(dict[int, list[int]]).decode
_rows = msgspec.json.Decoder(list[tuple[int, int, int]]).decode
_SEALED = "SELECT json_group_object(key, json(offsets)) FROM by_key WHERE block = ?1"
_UNSEALED = """
SELECT json_group_object(key, json(offsets)) FROM
(SELECT key, json_group_array(offset ORDER BY offset) AS offsets FROM events
WHERE offset BETWEEN ?1 AND ?2 GROUP BY key)
"""
_CHOSEN = """
SELECT json_group_array(json_array(offset, checksum, length(payload))) FROM events
WHERE offset IN (SELECT value FROM json_each(?1))
"""
_REINDEX = "INSERT INTO by_key SELECT ?1, value ->> 0, value ->> 1 FROM json_each(?2)"
_SUBTRACT = """
UPDATE blocks SET events = events - ?2, bytes = bytes - ?3, published_min = iif(events > ?2, published_min, NULL),
published_max = iif(events > ?2, published_max, NULL) WHERE block = ?1
"""


class Chosen(NamedTuple):
    """The events of some keys in one block."""

    block: int
    is_sealed: bool
    by_key: dict[int, list[int]]  # the offsets of all events of the block, by key
    offsets: list[int]  # those to remove


class Removal:
    """Used by the writer's thread only."""

    def __init__(
        self, path: str, connection: Connection, writer: Callable[[], Writer], identities: RemovedIdentities
    ) -> None:
        self._path, self._connection, self._writer, self._identities = path, connection, writer, identities
        self._proved, self._keys = ProvedBlocks(), KeyTable()

    def choose(self, block: int, until: int, is_wanted: Callable[[str], bool]) -> Chosen:
        """Return the events of a block up to an offset, without those whose keys are wanted.

        Raises `LogDamaged` if the block is damaged, because it is not known then which keys its events have.
        """
        first, last = block * BLOCK, block * BLOCK + BLOCK - 1
        low_water, is_sealed = get_low_water(self._connection), block <= self._writer().sealed_block
        if is_sealed:
            is_whole = self._proved.until(self._connection, first, last) == last
            found = self._connection.exec_driver_sql(_SEALED, (block,)).scalar_one() if is_whole else "{}"
        else:
            is_whole = self._writer().is_undamaged(max(first, low_water + 1), last)
            found = self._connection.exec_driver_sql(_UNSEALED, (first, last)).scalar_one() if is_whole else "{}"
        if not is_whole:
            reason = f"events from offset {first} to {last}, or their index, are damaged, so none of them was removed"
            raise LogDamaged(self._path, f"{reason}; zbus log verify lists what is damaged")
        index = _index(found)
        names = self._keys.learn(self._connection, index)
        unwanted = [key for key in index if key in names and not is_wanted(names[key][0])]
        offsets = sorted([offset for key in unwanted for offset in index[key] if low_water < offset <= until])
        return Chosen(block, is_sealed, index, offsets)

    def remove(self, chosen: Chosen, also: Callable[[], None] = lambda: None) -> int:
        """Remove the chosen events. `also` is called in the same transaction. Returns how many were removed."""
        connection, offsets = self._connection, json.dumps(chosen.offsets)
        with transaction(connection):
            found = _rows(connection.exec_driver_sql(_CHOSEN, (offsets,)).scalar_one())
            if len(found) != len(chosen.offsets):
                missing = min(set(chosen.offsets) - {row[0] for row in found})
                raise LogDamaged(self._path, f"the event at offset {missing} is missing", (missing, missing))
            store_removed(connection, chosen.block, {offset: checksum for offset, checksum, _ in found}, self._path)
            self._identities.remember(LISTED, offsets)
            state = get_state(connection)
            until = max(state.removed_until, chosen.offsets[-1])
            set_state(connection, removals=state.removals + 1, removed_until=until)
            connection.exec_driver_sql(
                "DELETE FROM events WHERE offset IN (SELECT value FROM json_each(?))", (offsets,)
            )
            if chosen.is_sealed:
                self._reindex(chosen, sum(row[2] for row in found))
            also()
        free_pages(connection)
        return len(chosen.offsets)

    def _reindex(self, chosen: Chosen, size: int) -> None:
        gone = set(chosen.offsets)
        left = {key: [each for each in offsets if each not in gone] for key, offsets in chosen.by_key.items()}
        index = json.dumps([(key, offsets) for key, offsets in left.items() if offsets])
        (row,) = block_rows(self._connection, chosen.block, chosen.block)
        self._connection.exec_driver_sql("DELETE FROM by_key WHERE block = ?", (chosen.block,))
        self._connection.exec_driver_sql(_REINDEX, (chosen.block, index))
        self._connection.exec_driver_sql(_SUBTRACT, (chosen.block, len(gone), size))
        if row.checksum is not None:  # otherwise version 0.1 sealed it
            store_checksums(self._connection, chosen.block, row.index_checksum != UNPROVABLE)
