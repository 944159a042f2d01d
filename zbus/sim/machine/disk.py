"""A simulated disk: what a log has stored, which outlives the processes that write it, and how it fails.

A commit becomes durable in one step, some time after its rows were written. A process that is killed in between leaves
the rows behind or not, as the kernel may or may not have written them; a power cut removes them, and also the positions
that were not synced. A torn commit is recognized by its checksum and discarded as a whole, as SQLite does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from random import Random
from threading import RLock
from typing import NamedTuple, Protocol

from zbus.keys import KeySet
from zbus.ports.lineage import Incarnation, Lineage
from zbus.ports.log import Lease, Page, Row, Schema, Span, Stored

FSYNC_S = (0.0005, 0.003)
NOTIFY_S = (0.00005, 0.0005)  # from the commit to the callback


class Held(NamedTuple):
    """The lease of a durable name. It ends with its process."""

    token: str
    owner: str  # such as "process 4711"


class CursorState(NamedTuple):
    """A stored cursor."""

    offset: int
    keys: tuple[str, ...]
    updated_at_ns: int
    incarnation: int = 0  # that stored the event at the offset


class Real(Protocol):
    """A real log below a disk, for comparison."""

    def stored(self, rows: Sequence[Row], offsets: Sequence[int], repeated: Collection[int]) -> None:
        """Store rows that became durable."""

    def page(self, expected: Page, keys: KeySet, span: Span, limit: int, low_water: int) -> Page:
        """Return the page that the real log has in place of the expected one."""

    def purged(self, keys: KeySet, removed: int) -> None:
        """Purge some keys."""

    def claimed(self, name: str, keys: Sequence[str], start: int, lease: Lease) -> None:
        """Take the lease of a durable name."""

    def advanced(self, name: str, offset: int) -> None:
        """Store the position of a durable name whose lease is held."""

    def released(self, name: str) -> None:
        """Release the lease of a durable name."""

    def moved(self, name: str, offset: int | None) -> None:
        """Move a cursor, or delete it."""

    def positions_changed(self, changed: Mapping[str, int], removed: Collection[str] = ()) -> None:
        """Store and remove positions."""

    def schema_stored(self, schema: Schema) -> None:
        """Store one more version of a schema."""

    def reopen(self, disk: Disk) -> None:
        """Close the log, open it again, and compare it with the disk."""

    def rebuild(self, disk: Disk) -> None:
        """Begin anew with what the disk has."""


class Disk:
    """The files of one log. `point` is called at named steps, at which a fault may be aimed."""

    def __init__(self, name: str, chance: Random) -> None:
        self.name, self.chance = name, chance
        self.lock = RLock()  # the contract suite uses real threads
        self.log_id = chance.getrandbits(60) << 1 | 1
        self.incarnations: list[Incarnation] = []
        self.is_resumed = False  # a copy of a running machine: its process continues the same incarnation
        self.digests = [bytes(8)]  # by offset: of all events up to it, removed ones included
        self.low_water = 0
        self.rows: list[Row] = []  # the first one has the offset after `low_water`
        self.purged: set[int] = set()  # the offsets of those rows that were removed from the middle
        self.identities: dict[tuple[int, int], int] = {}
        self.removed: set[tuple[int, int]] = set()  # of events that retention removed: simulated time is too short
        self.cursors: dict[str, CursorState] = {}
        self.positions: dict[str, int] = {}
        self.schemas: list[Schema] = []
        self.leases: dict[str, Held] = {}
        self.writer_pid: int | None = None  # of the process that has the log open for writing
        self.processes_ended = 0  # a log that an earlier process opened has no effect any more
        self.corrupt: set[int] = set()  # offsets of events that fail their checksum
        self.writing: Sequence[Row] = ()  # a commit that is not durable yet
        self._synced_positions: dict[str, int] = {}
        # Faults.
        self.fsync_s = FSYNC_S
        self.notify_s = NOTIFY_S
        self.full = False
        self.refuse_p = 0.0  # the probability that a commit fails with an I/O error and stores nothing
        self.unknown_p = 0.0  # the probability that a commit fails and may or may not be stored
        self.broken_p = 0.0  # the same, and the log stops writing until it is opened again, as SQLite does after EIO
        self.point: Callable[[str], None] = _no_fault
        self.real: Real | None = None  # a real log that has the same events
        self.on_stored: Callable[[Sequence[Row], Sequence[int]], None] = _nothing
        self.on_removed: Callable[[Sequence[Row]], None] = _nothing

    @property
    def head(self) -> int:
        """The offset of the last stored event."""
        return self.low_water + len(self.rows)

    @property
    def lineage(self) -> Lineage:
        """The incarnations of the log."""
        return Lineage(tuple(self.incarnations) or (Incarnation(0, 1),))

    def offset_of(self, at: int) -> int:
        """Return the offset of a row, by its place among those that are left."""
        return self.low_water + 1 + at

    @property
    def size_bytes(self) -> int:
        """The size of the stored events."""
        return sum([len(row.payload) + len(row.key) + 64 for _, row in self.stored()])

    def stored(self, after: int = 0, until: int | None = None) -> Iterator[tuple[int, Row]]:
        """Yield the events after an offset up to another one, with their offsets."""
        first = max(0, after - self.low_water)
        last = None if until is None else max(0, until - self.low_water)
        for offset, row in enumerate(self.rows[first:last], self.offset_of(first)):
            if offset not in self.purged:
                yield offset, row

    def store(self, rows: Sequence[Row]) -> tuple[Stored, list[Row], list[int]]:
        """Store the rows that are new. Returns the outcome, and the new rows with their offsets.

        Everything is stored or nothing.
        """
        offsets: list[int] = []
        repeated: set[int] = set()
        conflicts: dict[int, str] = {}
        new: list[Row] = []
        new_offsets: list[int] = []
        identities, head = self.identities, self.head
        for index, row in enumerate(rows):
            identity = (row.publisher_id, row.sequence)
            known = identities.get(identity)
            if known is None and identity in self.removed:
                offsets.append(self.low_water)
                repeated.add(index)
                continue
            if known is not None:
                at = known - self.low_water - 1
                stored = self.rows[at] if at < len(self.rows) else new[at - len(self.rows)]
                if (stored.key, stored.payload) != (row.key, row.payload):
                    conflicts[index] = stored.key
                offsets.append(known)
                repeated.add(index)
                continue
            head += 1
            identities[identity] = head
            offsets.append(head)
            new.append(row)
            new_offsets.append(head)
        self.rows += new
        self.digests += _digests(self.digests[-1], new)
        if self.real is not None and self.low_water == 0 and not self.purged:
            self.real.stored(rows, offsets, repeated)
        elif self.real is not None and new:  # the real log still knows the identities of events that were removed
            self.real.stored(new, new_offsets, ())
        if new:
            self.on_stored(new, new_offsets)
        return Stored(offsets, repeated, conflicts), new, new_offsets

    def trim(self, until: int) -> int:
        """Remove every event up to an offset. Returns how many."""
        number = min(max(0, until - self.low_water), len(self.rows))
        gone = [row for _, row in self.stored(until=self.low_water + number)]
        if gone:
            self._removed(gone)
        del self.rows[:number]
        self.low_water += number
        self.purged = {offset for offset in self.purged if offset > self.low_water}
        self.corrupt = {offset for offset in self.corrupt if offset > self.low_water}
        return number

    def purge(self, is_unwanted: Callable[[int, Row], bool]) -> int:
        """Remove events from the middle. Their offsets are not used again. Returns how many."""
        gone = [(offset, row) for offset, row in self.stored() if is_unwanted(offset, row)]
        if gone:
            self._removed([row for _, row in gone])
        self.purged.update(offset for offset, _ in gone)
        self.corrupt -= self.purged
        return len(gone)

    def _removed(self, rows: Sequence[Row]) -> None:
        self.on_removed(rows)
        for row in rows:
            self.identities.pop((row.publisher_id, row.sequence), None)
            self.removed.add((row.publisher_id, row.sequence))

    def store_positions(self, changed: Mapping[str, int], sync: bool = False) -> None:
        """Store positions. New names are synced; the newest values of others may be lost in a power cut."""
        for name in changed:
            if name not in self._synced_positions:
                self._synced_positions[name] = changed[name]
        self.positions.update(changed)
        if self.real is not None and changed:
            self.real.positions_changed(changed)
        if sync or self.chance.random() < 0.5:
            self._synced_positions = dict(self.positions)

    def remove_positions(self, names: Collection[str]) -> None:
        """Remove positions, which is synced."""
        for name in names:
            self.positions.pop(name, None)
            self._synced_positions.pop(name, None)
        if self.real is not None and names:
            self.real.positions_changed({}, names)

    def process_ended(self, *, power_cut: bool) -> None:
        """The process was killed, or the power was cut."""
        if self.writing and not power_cut and self.chance.random() < 0.5:
            self.store(self.writing)
        self.writing = ()
        self.leases.clear()
        self.writer_pid = None
        self.processes_ended += 1
        if power_cut:
            self.positions = dict(self._synced_positions)
        if self.real is not None:
            self.real.reopen(self)

    def mend(self) -> None:
        """End all faults of this disk. Corrupt events stay corrupt."""
        self.fsync_s, self.notify_s = FSYNC_S, NOTIFY_S
        self.full, self.refuse_p, self.unknown_p, self.broken_p = False, 0.0, 0.0, 0.0

    def detach(self) -> None:
        """Forget the world: it has ended."""
        self.point, self.on_stored, self.on_removed = _no_fault, _nothing, _nothing

    # Copies.

    def copy(self) -> Disk:
        """Return a copy of all files, as a backup tool would make it: with the same log id."""
        other = Disk.__new__(Disk)
        other.__dict__.update(self.__dict__)
        other.real = None
        other.lock, other.writing, other.leases, other.writer_pid = RLock(), (), {}, None
        other.detach()
        other.mend()
        other.restore(self)
        return other

    def restore(self, copy: Disk) -> None:
        """Replace all files by those of a copy. Close the log first."""
        self.log_id, self.low_water = copy.log_id, copy.low_water
        self.incarnations, self.digests = list(copy.incarnations), list(copy.digests)
        self.rows, self.schemas, self.corrupt = list(copy.rows), list(copy.schemas), set(copy.corrupt)
        self.purged = set(copy.purged)
        self.identities, self.cursors = dict(copy.identities), dict(copy.cursors)
        self.removed = set(copy.removed)
        self.positions, self._synced_positions = dict(copy.positions), dict(copy._synced_positions)
        if self.real is not None:
            self.real.rebuild(self)


def _digests(digest: bytes, rows: Sequence[Row]) -> Iterator[bytes]:
    """Return the digest after each row."""
    for row in rows:
        leaf = zlib.crc32(row.payload, zlib.crc32(f"{row.publisher_id}/{row.sequence}/{row.key}".encode()))
        digest = blake2b(digest + leaf.to_bytes(4), digest_size=8).digest()
        yield digest


def _no_fault(step: str) -> None:
    """Nothing is aimed at this step."""


def _nothing(*args: object) -> None:
    """No ledger is interested."""
