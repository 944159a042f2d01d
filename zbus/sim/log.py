"""`SimLog`: the log port on a simulated disk.

The contract suite of the port runs on it, and so proves that it keeps the promises of the SQLite log. Appends that
arrive while a commit is being synced share the next commit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from zbus.errors import CursorError, EventCorrupt, LogError, LogFull, LogLocked, LogReadOnly, LogTrimmed, ZbusError
from zbus.event import Event
from zbus.keys import KeySet
from zbus.observe.records import record_reason
from zbus.ports.log import (
    Appended,
    AppendResult,
    Committed,
    Cursor,
    Lease,
    Outcome,
    Promise,
    ProxiedWrite,
    Refused,
    Row,
    Schema,
    Span,
    Stored,
    Unknown,
)

from .disk import CursorState, Disk, Held

if TYPE_CHECKING:
    from zbus.ports.log import Cursors, Log, Page, Positions, SchemaStore

NAME_MAX = 200
SCANNED_EVENTS = 4096  # a page looks no further
PROMISE = Promise("power loss", "one", True, "as long as its event", None)

Append = tuple[Sequence[Row], Appended, Any]
Later = Callable[[float, Callable[[], None]], object]  # calls a function after a number of seconds


class Retention(NamedTuple):
    """What the log keeps."""

    age_s: float | None = None
    events: int | None = None
    size_bytes: int | None = None
    ignore_cursors: bool = False


class SimLog:
    """A log on a simulated disk. `later` calls on the log's thread, and never if the process was killed meanwhile."""

    def __init__(
        self,
        disk: Disk,
        later: Later,
        time_ns: Callable[[], int],
        chance: Random,
        *,
        owner: str = "process 1",
        pid: int = 1,
        read_only: bool = False,
        retention: Retention | None = None,
    ) -> None:
        self.disk, self.path, self.read_only = disk, disk.name, read_only
        self._later, self._chance, self._retention, self._time_ns = later, chance, retention, time_ns
        self._owner = owner
        self._appends: list[Append] = []
        self._batch: list[Append] = []  # what is being synced
        self._tail: Callable[[Committed], None] | None = None
        self._watched: Callable[[int], None] | None = None
        self._shown = -1
        self._closed = False
        self._notices: deque[Callable[[], None]] = deque()  # of commits whose callers do not know yet
        self._cursors = SimCursors(disk, later, time_ns, chance, owner)
        self._positions = SimPositions(disk)
        self._schemas = SimSchemas(disk, read_only)
        if not read_only:
            with disk.lock:
                if _OWNER in disk.leases:
                    raise LogLocked(disk.name, pid)
                disk.leases[_OWNER] = Held("", owner)

    @property
    def promise(self) -> Promise:
        """The guarantees of this log: those of SQLite with fsync."""
        return PROMISE

    @property
    def cursors(self) -> SimCursors:
        """The cursors of durable subscriptions."""
        return self._cursors

    @property
    def positions(self) -> SimPositions:
        """This node's positions in the logs of other nodes."""
        return self._positions

    @property
    def schemas(self) -> SimSchemas:
        """The registered schemas."""
        return self._schemas

    @property
    def log_id(self) -> int:
        """The identity of this history."""
        return self.disk.log_id

    @property
    def writer_id(self) -> int:
        """The same: it has one writer."""
        return self.disk.log_id

    def append(self, rows: Sequence[Row], done: Appended, about: Any = None) -> None:
        """Queue rows for the next commit."""
        if self.read_only:
            return done(AppendResult(about, Refused(LogReadOnly(self.path))))
        if self._closed:
            return done(AppendResult(about, Refused(LogError(f"{self.path} is closed"))))
        self._appends.append((rows, done, about))
        if any(row.provenance is not None for row in rows):
            self.disk.point("received")
        if not self._batch:
            self._begin()

    def tail(self, committed: Callable[[Committed], None]) -> int:
        """Call `committed` with every event after the returned offset."""
        with self.disk.lock:
            self._tail = committed
            return self.disk.head

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        """Return the next page of a span."""
        disk = self.disk
        with disk.lock:
            low_water, head = disk.low_water, disk.head
            if 0 < span.after < low_water:
                raise LogTrimmed(span.after, low_water)
            after = max(span.after, low_water)
            end = head if span.until is None else min(span.until, head)
            found: list[tuple[int, Row]] = []
            covered = after
            last = min(end, after + SCANNED_EVENTS)
            for offset, row in enumerate(disk.rows[after - low_water : last - low_water], after + 1):
                covered = offset
                if row.key in keys and _in_time(row, span):
                    found.append((offset, row))
                    if len(found) == limit:
                        break
            else:
                if last == end and span.until is not None:
                    covered = max(covered, min(span.until, head))
            return SimPage(found, covered, low_water, disk.corrupt.copy() if disk.corrupt else set())

    def head(self) -> int:
        """Return the last committed offset."""
        return self.disk.head

    def low_water(self) -> int:
        """Return the offset up to which retention removed every event."""
        return self.disk.low_water

    def size_bytes(self) -> int:
        """Return the size of the stored events."""
        return self.disk.size_bytes

    def before(self, offset: int) -> int:
        """Return the position to read after, so that the next event is the one at `offset`."""
        return max(0, offset - 1)

    def count(self, after: int, until: int) -> int:
        """Return how many events were stored between two offsets."""
        return max(0, until - after)

    def narrow(self, span: Span) -> Span:
        """Return the span with its times turned into offsets, and with an end."""
        disk = self.disk
        with disk.lock:
            low_water, head = disk.low_water, disk.head
            if 0 < span.after < low_water:
                raise LogTrimmed(span.after, low_water)
            until = head if span.until is None else min(span.until, head)
            if span.from_ns is None:
                return span._replace(until=until)
            first = max(span.after, low_water)
            after = head
            for offset, row in enumerate(disk.rows[first - low_water :], first):
                if row.published_at >= span.from_ns:
                    after = offset
                    break
            after = max(span.after, after)
            return span._replace(after=after, until=max(after, until))

    def watch(self, moved: Callable[[int], None]) -> None:
        """Call `moved` with the head whenever it has changed."""
        self._watched = moved
        self._look()

    def accept_proxied_writes(self, write: ProxiedWrite) -> None:
        """Do nothing: no other process writes to a simulated log."""

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of this log."""
        return {"log": self.path, "head": self.head(), "low_water": self.low_water(), "read_only": self.read_only}

    def close(self, timeout_s: float) -> None:
        """Store what was appended and release the log."""
        if self._closed:
            return
        self._closed = True
        self._cursors.close()
        if not self.read_only:
            while self._batch or self._appends:
                batch, self._batch = self._batch or self._appends, []
                self._appends = self._appends if batch is not self._appends else []
                self._commit(batch)
            while self._notices:
                self._notify_next()
            with self.disk.lock:
                self._cursors.release_all()
                self.disk.leases.pop(_OWNER, None)
                self.disk.store_positions({}, sync=True)

    # On the log's thread.

    def _begin(self) -> None:
        """Write what was appended, and sync it some time later."""
        self._batch, self._appends = self._appends, []
        self.disk.writing = [row for rows, _, _ in self._batch for row in rows]
        low, high = self.disk.fsync_s
        self._later(low + self._chance.random() * (high - low), self._synced)

    def _synced(self) -> None:
        if self._closed:
            return
        batch, self._batch = self._batch, []
        notify = self._commit(batch)
        self.disk.point("committed")
        low, high = self.disk.notify_s
        self._later(low + self._chance.random() * (high - low), notify)
        if self._appends:
            self._begin()

    def _commit(self, appends: Sequence[Append]) -> Callable[[], None]:
        """Store appends in one transaction. Returns the function that notifies the callers."""
        with self.disk.lock:
            outcomes, committed = self._store(appends)
            self.disk.writing = ()
            self._prune()

        def notify() -> None:
            if committed is not None and self._tail is not None:
                self._tail(committed)
            for (_, done, about), outcome in zip(appends, outcomes, strict=True):
                done(AppendResult(about, outcome))

        self._notices.append(notify)
        return self._notify_next

    def _notify_next(self) -> None:
        """Notify the callers of the oldest commit: delays differ, and the order of commits is kept."""
        if self._notices:
            self._notices.popleft()()

    def _store(self, appends: Sequence[Append]) -> tuple[list[Outcome], Committed | None]:
        disk = self.disk
        failed: Outcome | None = None
        stores = True
        if disk.full:
            failed, stores = Refused(LogFull(self.path)), False
        elif disk.refuse_p and self._chance.random() < disk.refuse_p:
            failed, stores = Refused(LogError(f"{self.path}: input/output error")), False
        elif disk.unknown_p and self._chance.random() < disk.unknown_p:
            failed, stores = Unknown(LogError(f"{self.path}: the disk did not reply")), self._chance.random() < 0.5
        outcomes: list[Outcome] = []
        rows_stored: list[Row] = []
        offsets_stored: list[int] = []
        for rows, _, _ in appends:
            if stores:
                offsets, repeated, new, new_offsets = disk.store(rows)
                rows_stored += new
                offsets_stored += new_offsets
                outcomes.append(Stored(offsets, repeated))
        if failed is not None:
            outcomes = [failed] * len(appends)
        return outcomes, Committed(rows_stored, offsets_stored) if rows_stored else None

    def _prune(self) -> None:
        """Remove what retention does not keep."""
        rules, disk = self._retention, self.disk
        if rules is None:
            return
        target = disk.low_water
        if rules.events is not None:
            target = max(target, disk.head - rules.events)
        if rules.age_s is not None:
            cutoff = self._time_ns() - int(rules.age_s * 1e9)
            young = next((at for at, row in enumerate(disk.rows) if row.published_at >= cutoff), len(disk.rows))
            target = max(target, disk.low_water + young)
        if rules.size_bytes is not None and disk.rows and disk.size_bytes > rules.size_bytes:
            mean = disk.size_bytes / len(disk.rows)
            target = max(target, disk.low_water + int((disk.size_bytes - rules.size_bytes) / mean) + 1)
        if not rules.ignore_cursors and disk.cursors:
            target = min(target, *[cursor.offset for cursor in disk.cursors.values()])
        disk.trim(target)

    def _look(self) -> None:
        if self._closed or self._watched is None:
            return
        head = self.disk.head
        if head != self._shown:
            self._shown = head
            self._watched(head)
        self._later(0.005, self._look)


_OWNER = "\0owner"  # the lease of the log itself, beside those of the durable names


class SimPage:
    """A page. An event that fails its checksum ends it, or is skipped and counted."""

    __slots__ = ("_corrupt", "_found", "covered", "low_water")

    def __init__(self, found: list[tuple[int, Row]], covered: int, low_water: int, corrupt: set[int]) -> None:
        self._found, self.covered, self.low_water, self._corrupt = found, covered, low_water, corrupt

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        """Return the events, the error that ends them early (or None), and the number of events skipped."""
        if not self._corrupt:
            return [row.event(offset) for offset, row in self._found], None, 0
        events: list[Event] = []
        skipped = 0
        for offset, row in self._found:
            if offset not in self._corrupt:
                events.append(row.event(offset))
            elif skip_corrupt:
                skipped += 1
            else:
                return events, EventCorrupt(offset, "its checksum does not match"), skipped
        return events, None, skipped


class SimCursors:
    """The cursors of one disk, as one process uses them."""

    def __init__(self, disk: Disk, later: Later, time_ns: Callable[[], int], chance: Random, owner: str) -> None:
        self._disk, self._later, self._time_ns, self._chance, self._owner = disk, later, time_ns, chance, owner
        self._closed = False
        self._pending: list[tuple[str, str, int, Callable[[ZbusError | None], None] | None]] = []

    def claim(self, name: str, keys: Sequence[str], start: int) -> Lease:
        """Take the lease of `name`."""
        if not isinstance(name, str) or not name or len(name) > NAME_MAX or not name.isprintable():
            raise CursorError(str(name), "its name must be printable, with at most 200 characters")
        disk = self._disk
        with disk.lock:
            if name in disk.leases:
                holder = disk.leases[name].owner
                raise CursorError(
                    name, f"{holder} holds its lease; a durable subscription has one subscriber at a time"
                )
            before = disk.cursors.get(name)
            token = self._chance.randbytes(16).hex()
            disk.leases[name] = Held(token, self._owner)
            offset = start if before is None else before.offset
            disk.cursors[name] = CursorState(offset, tuple(keys), self._time_ns() if before is None else before[2])
            return Lease(token, offset, () if before is None else before.keys)

    def advance(
        self, name: str, token: str, offset: int, done: Callable[[ZbusError | None], None] | None = None
    ) -> None:
        """Queue a position."""
        if self._closed:
            if done is not None:
                done(LogError(f"{self._disk.name} is closed; the position was not stored"))
            return
        self._pending.append((name, token, offset, done))
        if len(self._pending) == 1:
            low, high = self._disk.fsync_s
            self._later(low + self._chance.random() * (high - low), self.flush)

    def flush(self) -> None:
        """Store the positions that wait."""
        pending, self._pending = self._pending, []
        for name, token, offset, done in pending:
            with self._disk.lock:
                held = self._disk.leases.get(name)
                is_held = held is not None and held.token == token
                cursor = self._disk.cursors.get(name)
                if is_held and cursor is not None and offset > cursor.offset:
                    self._disk.cursors[name] = CursorState(offset, cursor.keys, self._time_ns())
            if not is_held:
                reason = "its lease is held by another subscriber, or was released"
                record_reason("LEASE_LOST", logging.WARNING, code="lease_lost", reason=reason, durable=name)
            if done is not None:
                done(None if is_held else CursorError(name, "its lease was lost; the position was not stored"))
        if pending:
            self._disk.point("acknowledged")

    def close(self) -> None:
        """Store the positions that wait. Later ones are refused."""
        self._closed = True
        self.flush()

    def release(self, name: str, token: str) -> None:
        """Store the pending positions and release the lease."""
        self.flush()
        with self._disk.lock:
            held = self._disk.leases.get(name)
            if held is not None and held.token == token:
                del self._disk.leases[name]

    def release_all(self) -> None:
        """Release what this process holds."""
        for name in [name for name, held in self._disk.leases.items() if held.owner == self._owner]:
            del self._disk.leases[name]

    def list(self) -> Sequence[Cursor]:
        """Return every cursor, by name."""
        with self._disk.lock:
            leases = self._disk.leases
            return [
                Cursor(name, each.offset, each.keys, each.updated_at_ns, leases[name].owner if name in leases else None)
                for name, each in sorted(self._disk.cursors.items())
            ]

    def reset(self, name: str, offset: int) -> None:
        """Move a cursor."""
        with self._disk.lock:
            cursor = self._unused(name)
            self._disk.cursors[name] = CursorState(offset, cursor.keys, self._time_ns())

    def delete(self, name: str) -> None:
        """Delete a cursor."""
        with self._disk.lock:
            self._unused(name)
            del self._disk.cursors[name]

    def _unused(self, name: str) -> CursorState:
        cursor = self._disk.cursors.get(name)
        if cursor is None:
            raise CursorError(name, "there is no such cursor")
        if name in self._disk.leases:
            raise CursorError(name, f"{self._disk.leases[name].owner} uses it; stop that process first")
        return cursor


class SimPositions:
    """Named positions on one disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def load(self) -> dict[str, int]:
        """Return all positions by name."""
        return dict(self._disk.positions)

    def store(self, changed: Mapping[str, int]) -> None:
        """Store positions."""
        with self._disk.lock:
            self._disk.store_positions(changed)
        self._disk.point("position stored")

    def remove(self, names: Collection[str]) -> None:
        """Remove positions."""
        with self._disk.lock:
            for name in names:
                self._disk.positions.pop(name, None)


class SimSchemas:
    """The schemas on one disk."""

    def __init__(self, disk: Disk, read_only: bool) -> None:
        self._disk, self._read_only = disk, read_only

    def load(self) -> Sequence[Schema]:
        """Return all versions, by expression and version."""
        return sorted(self._disk.schemas, key=lambda each: (each.expression, each.version))

    def store(self, schema: Schema) -> None:
        """Store one more version."""
        if self._read_only:
            raise LogReadOnly(self._disk.name)
        self._disk.schemas.append(schema)


def _in_time(row: Row, span: Span) -> bool:
    return (span.from_ns is None or row.published_at >= span.from_ns) and (
        span.to_ns is None or row.published_at <= span.to_ns
    )


if TYPE_CHECKING:
    _port: type[Log] = SimLog
    _cursors: type[Cursors] = SimCursors
    _positions: type[Positions] = SimPositions
    _schemas: type[SchemaStore] = SimSchemas
