"""Checksums of the index of sealed blocks, and the proof that a reader of some keys misses no event of a block.

A reader of some keys sees only what the index names, so a damaged index would hide events. Sealing therefore stores two
checksums with each block: `index_checksum` of its rows of `by_key` and the names of its keys, and `checksum` of the row
of `blocks` itself. A block is proved if both match. Events of a block that is not proved are found by reading all of
them. Readers therefore match the names in the table of keys, and not those in its index by name.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection

from .checksum import crc32
from .tables import BLOCK, LINEAGE_SINCE, file_version

UNPROVABLE = -1  # the index checksum of a block with damaged events
PROVED_MAX = 1 << 20  # blocks that a process remembers

# `CROSS JOIN` keeps the order of the keys.
_INDEX = """
SELECT CAST(group_concat(keys.key || offsets) AS BLOB) FROM by_key CROSS JOIN keys ON keys.id = by_key.key
WHERE block = ?
"""
_COUNT = "SELECT ifnull(sum(json_array_length(offsets)), 0) FROM by_key WHERE block = ?"
_BLOCKS = """
SELECT block, events, bytes, published_min, published_max, digest, index_checksum, checksum
FROM blocks WHERE block BETWEEN ? AND ? ORDER BY block
"""
_OLD_BLOCKS = "SELECT block, events FROM blocks WHERE block BETWEEN ? AND ? ORDER BY block"
# How many keys of a block have another name, or none, in the table or in the index by name.
_DIFFERENT_NAMES = """
SELECT count(*) FROM by_key LEFT JOIN keys AS stored ON stored.id = by_key.key
LEFT JOIN keys AS listed INDEXED BY sqlite_autoindex_keys_1 ON listed.key = stored.key AND listed.id = stored.id
WHERE block = ? AND listed.id IS NULL
"""


class BlockRow(NamedTuple):
    """A row of `blocks`. Blocks that version 0.1 sealed have neither a digest nor checksums."""

    block: int
    events: int
    payload_bytes: int
    published_min: int | None
    published_max: int | None
    digest: bytes | None = None
    index_checksum: int | None = None
    checksum: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the row matches its checksum."""
        try:
            if self.checksum is None:  # version 0.1 sealed it
                return isinstance(self.events, int) and self.digest is None and self.index_checksum is None
            return self.checksum == self.made_checksum
        except (struct.error, TypeError):
            return False

    @property
    def made_checksum(self) -> int:
        """The checksum of the other values."""
        times = self.published_min or 0, self.published_max or 0
        numbers = struct.pack("<qqqqqq", self.block, self.events, self.payload_bytes, *times, self.index_checksum or 0)
        return crc32(self.digest or b"", crc32(numbers))


def block_rows(connection: Connection, first: int, last: int) -> list[BlockRow]:
    """Return the rows of some sealed blocks in a file of this version."""
    return [BlockRow(*row) for row in connection.exec_driver_sql(_BLOCKS, (first, last))]


def index_checksum(connection: Connection, block: int) -> int:
    """Return the checksum of the index of a block."""
    return crc32(connection.exec_driver_sql(_INDEX, (block,)).scalar_one() or b"")


def store_checksums(connection: Connection, block: int, provable: bool) -> None:
    """Store the checksums of a block that was just sealed, with its digest. Call it in a transaction."""
    made = index_checksum(connection, block) if provable else UNPROVABLE
    connection.exec_driver_sql("UPDATE blocks SET index_checksum = ?2 WHERE block = ?1", (block, made))
    (row,) = block_rows(connection, block, block)
    connection.exec_driver_sql("UPDATE blocks SET checksum = ?2 WHERE block = ?1", (block, row.made_checksum))


class ProvedBlocks:
    """The blocks whose index this process has proved. Each is proved once, when it is first used. Thread-safe."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._lock = threading.Lock()

    def until(self, connection: Connection, first: int, last: int) -> int:
        """Return the last offset from `first` to `last` up to which the index is proved, or `first` - 1 if none is."""
        with self._lock:
            end = last // BLOCK
            at = first // BLOCK
            while at <= end and at in self._blocks:
                at += 1
            if at <= end:
                at = self._prove(connection, at, end)
            return max(first - 1, min(last, at * BLOCK - 1))

    def _prove(self, connection: Connection, first: int, last: int) -> int:
        """Prove blocks in order. Returns the first one that is not proved."""
        rows: Sequence[Any]
        if file_version(connection) < LINEAGE_SINCE:
            found = connection.exec_driver_sql(_OLD_BLOCKS, (first, last))
            rows = [BlockRow(block, events, 0, None, None) for block, events in found]
        else:
            rows = block_rows(connection, first, last)
        at = first
        for row in rows:
            if row.block != at or not (at in self._blocks or self._is_proved(connection, row)):
                break
            if len(self._blocks) >= PROVED_MAX:
                self._blocks.clear()
            self._blocks.add(at)
            at += 1
        return at

    def _is_proved(self, connection: Connection, row: BlockRow) -> bool:
        if not row.is_whole:
            return False
        if row.index_checksum is not None:
            return row.index_checksum == index_checksum(connection, row.block)
        # Version 0.1 sealed it: at least the number of events must be right, and each name must be the same twice.
        listed = connection.exec_driver_sql(_COUNT, (row.block,)).scalar_one()
        return listed == row.events and not connection.exec_driver_sql(_DIFFERENT_NAMES, (row.block,)).scalar_one()
