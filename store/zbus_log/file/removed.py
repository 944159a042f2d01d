"""Events that were removed from the middle of the log: their offsets and their checksums stay.

A row of `removed` stands for consecutive offsets of one block. It keeps the checksum of each event, a leaf of the
block's digest, so that digests do not change, and it tells removed events from missing ones. Rows do not overlap.
They stay until the low-water mark has passed them and their block is sealed.

Retention that removes the oldest events of an unsealed block keeps their leaves here too, below the low-water mark.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from zbus.errors import LogDamaged

from .checksum import crc32
from .tables import BLOCK, get_head, get_low_water, get_state

LEAF_BYTES = 4

_pairs = msgspec.json.Decoder(list[tuple[int, int]]).decode
# Rows whose length does not match their offsets are damaged, and explain nothing: their events count as missing.
_IS_SOUND = f"length(leaves) = (last - first + 1) * {LEAF_BYTES} AND first / {BLOCK} = last / {BLOCK}"
_BETWEEN = f"first BETWEEN ?1 - {BLOCK} AND ?2 AND last >= ?1"
_RANGES = f"""
SELECT first, last FROM removed WHERE {_BETWEEN} AND {_IS_SOUND}
UNION ALL SELECT first, last FROM losses WHERE first <= ?2 AND last >= ?1 ORDER BY first
"""
_COUNT = f"""
SELECT ifnull(sum(min(last, ?2) - max(first, ?1) + 1), 0) FROM
(SELECT first, last FROM removed WHERE {_BETWEEN} AND {_IS_SOUND}
UNION ALL SELECT first, last FROM losses WHERE first <= ?2 AND last >= ?1)
"""
_COUNT_LOST = "SELECT ifnull(sum(min(last, ?2) - max(first, ?1) + 1), 0) FROM losses WHERE first <= ?2 AND last >= ?1"
_STORE = "INSERT INTO removed (first, last, leaves, checksum) VALUES (?, ?, ?, ?)"


class Removed(NamedTuple):
    """A row of `removed`."""

    first: int
    last: int
    leaves: bytes
    checksum: int

    @property
    def is_whole(self) -> bool:
        """Whether it is well-formed and matches its checksum."""
        try:
            size = (self.last - self.first + 1) * LEAF_BYTES
            same_block = 0 < self.first <= self.last and self.first // BLOCK == self.last // BLOCK
            return same_block and len(self.leaves) == size and self.checksum == checksum_of(*self[:3])
        except (TypeError, struct.error):
            return False


def checksum_of(first: int, last: int, leaves: bytes) -> int:
    """Return the checksum of a row."""
    return crc32(leaves, crc32(struct.pack("<qq", first, last)))


def has_removed(connection: Connection) -> bool:
    """Return whether events were ever removed from the middle. Files of older versions have no such events."""
    return get_state(connection).removals > 0


def ranges_between(connection: Connection, first: int, last: int) -> list[tuple[int, int]]:
    """Return the ranges of offsets that were removed or accepted as lost, and overlap the given range, in order."""
    if not has_removed(connection):
        found = connection.exec_driver_sql(
            "SELECT first, last FROM losses WHERE first <= ?2 AND last >= ?1 ORDER BY first", (first, last)
        )
    else:
        found = connection.exec_driver_sql(_RANGES, (first, last))
    return [(int(each[0]), int(each[1])) for each in found]


def count_between(connection: Connection, first: int, last: int) -> int:
    """Return how many offsets of a range were removed or accepted as lost, in a file of this version."""
    return int(connection.exec_driver_sql(_COUNT, (first, last)).scalar_one())


def removed_ranges(connection: Connection, after: int) -> list[tuple[int, int]]:
    """Return the ranges of offsets after `after` whose events were removed, in order, in a file of this version."""
    found = connection.exec_driver_sql(
        f"SELECT first, last FROM removed WHERE first > ? AND {_IS_SOUND} ORDER BY first", (after,)
    )
    return [(int(each[0]), int(each[1])) for each in found]


def count_lost(connection: Connection, first: int, last: int) -> int:
    """Return how many offsets of a range were accepted as lost."""
    return int(connection.exec_driver_sql(_COUNT_LOST, (first, last)).scalar_one())


def rows_between(connection: Connection, first: int, last: int) -> list[Removed]:
    """Return the rows that begin in a range, in order."""
    found = connection.exec_driver_sql(
        "SELECT first, last, leaves, checksum FROM removed WHERE first BETWEEN ? AND ? ORDER BY first", (first, last)
    )
    return [Removed(*row) for row in found]


def leaves_by_offset(rows: Iterable[Removed]) -> Iterator[tuple[int, int]]:
    """Yield the offset and the checksum of each removed event."""
    for row in rows:
        count = len(row.leaves) // LEAF_BYTES
        yield from enumerate(struct.unpack(f"<{count}I", row.leaves[: count * LEAF_BYTES]), row.first)


def store_removed(connection: Connection, block: int, checksums: Mapping[int, int], path: str) -> None:
    """Add removed events of one block, by offset, and join the rows of the block. Call it in a transaction.

    Raises `LogDamaged` if a row of this block is damaged.
    """
    first, last = block * BLOCK, block * BLOCK + BLOCK - 1
    rows = rows_between(connection, first, last)
    if damaged := [row for row in rows if not row.is_whole]:
        reason = f"what it says about the removed events {damaged[0].first} to {damaged[0].last} is damaged"
        raise LogDamaged(path, reason)
    connection.exec_driver_sql("DELETE FROM removed WHERE first BETWEEN ? AND ?", (first, last))
    _store_runs(connection, {**dict(leaves_by_offset(rows)), **checksums})


def keep_leaves(connection: Connection, after: int, until: int) -> None:
    """Keep the leaves of the events after an offset up to another one, which retention is about to remove.

    Call it in a transaction.
    """
    found = connection.exec_driver_sql(
        "SELECT json_group_array(json_array(offset, checksum) ORDER BY offset) FROM events"
        " WHERE offset > ? AND offset <= ?",
        (after, until),
    ).scalar_one()
    _store_runs(connection, dict(_pairs(found)))


def _store_runs(connection: Connection, checksums: Mapping[int, int]) -> None:
    """Store a row for each run of consecutive offsets of one block."""
    runs: list[list[int]] = []
    for offset in sorted(checksums):
        if runs and offset == runs[-1][-1] + 1 and offset % BLOCK:
            runs[-1].append(offset)
        else:
            runs.append([offset])
    rows: list[tuple[int, int, bytes, int]] = []
    for run in runs:
        leaves = struct.pack(f"<{len(run)}I", *[checksums[offset] for offset in run])
        rows.append((run[0], run[-1], leaves, checksum_of(run[0], run[-1], leaves)))
    if rows:
        connection.exec_driver_sql(_STORE, rows)


def cut_removed(connection: Connection, cut: int) -> None:
    """Remove from a copy what is about offsets after its cut. Call it in a transaction."""
    connection.exec_driver_sql("DELETE FROM main.removed WHERE first > ?", (cut,))
    for row in [each for each in rows_between(connection, cut - BLOCK, cut) if each.last > cut]:
        leaves = row.leaves[: (cut - row.first + 1) * LEAF_BYTES]
        connection.exec_driver_sql("DELETE FROM main.removed WHERE first = ?", (row.first,))
        connection.exec_driver_sql(_STORE, (row.first, cut, leaves, checksum_of(row.first, cut, leaves)))


def drop_passed(connection: Connection, sealed_until: int) -> None:
    """Drop the rows of sealed blocks that the low-water mark has passed. Call it in a transaction."""
    connection.exec_driver_sql(
        "DELETE FROM removed WHERE first <= ?1 AND last <= ?1", (min(sealed_until, get_low_water(connection)),)
    )


def removed_after(connection: Connection, offset: int, rows_max: int) -> int:
    """Return the offset up to which every event after `offset` was removed or accepted as lost.

    Looks at `rows_max` rows at most, so it may return less.
    """
    found = connection.exec_driver_sql(
        f"SELECT first, last FROM (SELECT * FROM removed WHERE last > ?1 AND first > ?1 - {BLOCK} AND {_IS_SOUND}"
        " ORDER BY first LIMIT ?2) UNION ALL SELECT first, last FROM losses WHERE last > ?1 ORDER BY first",
        (offset, rows_max),
    )
    for first, last in found.all():
        if first > offset + 1:
            break
        offset = max(offset, int(last))
    return offset


def find_gaps(connection: Connection, after: int) -> list[tuple[int, int]]:
    """Return the ranges of offsets after `after` that are missing: neither removed nor accepted as lost."""
    head = get_head(connection)
    listed = connection.exec_driver_sql(
        "SELECT before + 1, offset - 1 FROM (SELECT offset, lag(offset, 1, ?1) OVER (ORDER BY offset) AS before"
        " FROM events WHERE offset > ?1) WHERE offset != before + 1",
        (after,),
    )
    found = [(int(first), int(last)) for first, last in listed]
    newest = int(connection.exec_driver_sql("SELECT ifnull(max(offset), 0) FROM events").scalar_one())
    if max(after, newest) < head:
        found.append((max(after, newest, get_low_water(connection)) + 1, head))
    gaps: list[tuple[int, int]] = []
    for first, last in found:
        gaps += gaps_between(first - 1, (), last, ranges_between(connection, first, last))
    return gaps


def gaps_between(
    after: int, offsets: Iterable[int], until: int, explained: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the ranges after `after` up to `until` that are neither among ascending offsets nor explained.

    >>> gaps_between(0, [1, 2, 5, 9], 12, [(3, 3), (6, 7)])
    [(4, 4), (8, 8), (10, 12)]
    """
    found: list[tuple[int, int]] = []
    known = sorted([*[(offset, offset) for offset in offsets], *explained])
    for first, last in [*known, (until + 1, until + 1)]:
        if after + 1 < first and after < until:
            found.append((after + 1, min(first - 1, until)))
        after = max(after, last)
    return found
