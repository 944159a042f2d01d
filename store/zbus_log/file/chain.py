"""The digest of a log up to an offset: a chain of hashes over the checksums of its events.

The checksum of an event is a leaf. The digest of a block is the hash of the digest of the block before it and of the
block's leaves; the digest at an offset inside a block has the leaves up to it. Sealing stores the digest of the block.
The leaves of events that are removed from the middle, or before their block is sealed, are kept: see `removed`. So a
digest requires reading one block, and the digest of the head, which the writer keeps, none.

The chain begins with the hash of nothing. In a file that an older version wrote, it begins after the last block that
was sealed without a digest, and digests before that are unknown. Offsets that were lost have no leaf.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import msgspec
from sqlalchemy import Connection

from .removed import LEAF_BYTES, leaves_by_offset, rows_between
from .removed import keep_leaves as keep_leaves_between
from .tables import BLOCK, LINEAGE_SINCE, file_version, get_head, get_low_water

DIGEST_BYTES = 16
# hashlib releases the interpreter lock for 2,048 bytes or more, and getting it back can take milliseconds.
_PART_BYTES = 2044
UNKNOWN = b""
START = blake2b(digest_size=DIGEST_BYTES).digest()

_checksums = msgspec.json.Decoder(list[int]).decode
_pairs = msgspec.json.Decoder(list[tuple[int, int]]).decode


def pack_leaves(checksums: list[int]) -> bytes:
    """Return checksums as leaves."""
    return struct.pack(f"<{len(checksums)}I", *checksums)


def link(before: bytes, leaves: bytes) -> bytes:
    """Return the digest after some leaves of a block, from the digest of the block before it."""
    return blake2b(before + leaves, digest_size=DIGEST_BYTES).digest()


def leaves_between(connection: Connection, first: int, last: int) -> bytes:
    """Return the leaves of the offsets from `first`, where a block begins, to `last` in it, in order of offsets."""
    gone = rows_between(connection, first, last)
    values = "json_array(offset, checksum)" if gone else "checksum"
    found = connection.exec_driver_sql(
        f"SELECT json_group_array({values}) FROM"
        " (SELECT offset, checksum FROM events WHERE offset BETWEEN ? AND ? ORDER BY offset)",
        (first, last),
    ).scalar_one()
    if not gone:
        return pack_leaves(_checksums(found))
    leaves = [each for each in leaves_by_offset(gone) if each[0] <= last]
    return pack_leaves([checksum for _, checksum in sorted([*leaves, *_pairs(found)])])


def sealed_digest(connection: Connection) -> tuple[int, bytes]:
    """Return the newest sealed block, or -1, and the digest with which the block after it begins."""
    found = connection.exec_driver_sql("SELECT block, digest FROM blocks ORDER BY block DESC LIMIT 1").one_or_none()
    return (-1, START) if found is None else (int(found[0]), START if found[1] is None else bytes(found[1]))


def digest_at(connection: Connection, offset: int) -> bytes:
    """Return the digest up to an offset, from the file only. Call it in a snapshot."""
    if file_version(connection) < LINEAGE_SINCE or not 0 <= offset <= get_head(connection):
        return UNKNOWN
    block = offset // BLOCK
    sealed, before = sealed_digest(connection)
    if block > sealed:
        for between in range(sealed + 1, block):
            before = link(before, leaves_between(connection, between * BLOCK, between * BLOCK + BLOCK - 1))
        return link(before, leaves_between(connection, block * BLOCK, offset))
    whole = _digest_of(connection, block)
    if not whole or offset == block * BLOCK + BLOCK - 1:
        return whole or UNKNOWN
    start = START if block == 0 else _digest_of(connection, block - 1)
    if start is None or get_low_water(connection) >= max(1, block * BLOCK):
        return UNKNOWN  # retention removed the block before, or some of the leaves
    return link(start or START, leaves_between(connection, block * BLOCK, offset))


def _digest_of(connection: Connection, block: int) -> bytes | None:
    """Return the digest of a sealed block; empty if an older version sealed it, None if the block does not exist."""
    found = connection.exec_driver_sql("SELECT ifnull(digest, x'') FROM blocks WHERE block = ?", (block,)).scalar()
    return None if found is None else bytes(found)


def check_block(connection: Connection, block: int) -> str | None:
    """Return what is wrong with the digest of a sealed block, or None. Call it in a snapshot.

    Nothing is known to be wrong if retention removed some of the block's leaves, or the digest of the block before it.
    """
    first, last = block * BLOCK, block * BLOCK + BLOCK - 1
    found, start = _digest_of(connection, block), START if block == 0 else _digest_of(connection, block - 1)
    if found is None or start is None or get_low_water(connection) >= max(1, first):
        return None
    if not found:
        return f"the digest of offsets {first} to {last} is missing" if block and start else None
    if found != link(start or START, leaves_between(connection, first, last)):
        return f"the digest of offsets {first} to {last} does not match their events"
    return None


def keep_leaves(connection: Connection, until: int) -> None:
    """Keep the leaves of the unsealed events up to `until`, which are about to be removed. Call it in a transaction."""
    keep_leaves_between(connection, sealed_digest(connection)[0] * BLOCK + BLOCK - 1, until)


class Chain:
    """The digest of the head, as the writer extends it. The digests of blocks that are not sealed yet are kept."""

    def __init__(self, connection: Connection, head: int) -> None:
        sealed, before = sealed_digest(connection)
        self._unsealed: dict[int, bytes] = {}
        self._end = (sealed + 2) * BLOCK - 1  # the last offset of the open block
        self._hash = blake2b(before, digest_size=DIGEST_BYTES)
        while self._end < head:
            self._update(leaves_between(connection, self._end - BLOCK + 1, self._end))
            self._next_block()
        self._update(leaves_between(connection, self._end - BLOCK + 1, head))
        # A copy may end with a sealed block, whose digest is known.
        self.newest = head, before if head == self._end - BLOCK else self._hash.digest()

    def add(self, first: int, leaves: bytes) -> None:
        """Add the leaves of consecutive offsets."""
        last = first + len(leaves) // LEAF_BYTES - 1
        while self._end < last:
            if first <= self._end:
                count = self._end - first + 1
                self._update(leaves[: count * LEAF_BYTES])
                leaves, first = leaves[count * LEAF_BYTES :], first + count
            self._next_block()
        for at in range(0, len(leaves), _PART_BYTES):
            self._hash.update(leaves[at : at + _PART_BYTES])
        self.newest = last, self._hash.digest()

    def of_block(self, block: int) -> bytes:
        """Return the digest of an unsealed block before the one of the head, and forget those before it."""
        for sealed in [each for each in self._unsealed if each < block]:
            del self._unsealed[sealed]
        return self._unsealed[block]

    def _next_block(self) -> None:
        before = self._unsealed[self._end // BLOCK] = self._hash.digest()
        self._end += BLOCK
        self._hash = blake2b(before, digest_size=DIGEST_BYTES)

    def _update(self, leaves: bytes) -> None:
        for at in range(0, len(leaves), _PART_BYTES):
            self._hash.update(leaves[at : at + _PART_BYTES])
