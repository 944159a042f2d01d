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

from zbus.errors import (
    CursorError,
    EventCorrupt,
    LogError,
    LogFull,
    LogLocked,
    LogReadOnly,
    LogTrimmed,
    LogWriterFailed,
    ZbusError,
    renewed,
)
from zbus.event import Event
from zbus.keys import KeySet
from zbus.observe.records import record, record_reason
from zbus.ports.lineage import Incarnation, Lineage
from zbus.ports.log import (
    Appended,
    AppendResult,
    Backup,
    Committed,
    Cursor,
    Lease,
    Outcome,
    Promise,
    ProxiedWrite,
    Purged,
    Refused,
    Row,
    Schema,
    Span,
    Unknown,
    identities_promise,
)

from .disk import CursorState, Disk, Held

if TYPE_CHECKING:
    from zbus.ports.log import Cursors, Log, Page, Positions, SchemaStore

NAME_MAX = 200
SCANNED_EVENTS = 4096  # a page looks no further
PRUNE_S = 15.0  # as often as SQLite, retention removes events
PRUNE_EVENTS = 4096  # and after this number of new ones
RETRY_S = 0.25  # a position that could not be stored is stored again
PROMISE = Promise("power loss", "one", True, identities_promise(604_800), None)

Append = tuple[Sequence[Row], Appended, Any]
Later = Callable[[float, Callable[[], object]], object]  # calls a function after a number of seconds


class Retention(NamedTuple):
    """The limits of a log, beyond which it removes its oldest events."""

    age_s: float | None = None
    events: int | None = None
    size_bytes: int | None = None
    ignore_cursors: bool = False
    keys: tuple[tuple[str, float | None], ...] = ()  # ages of some keys, in place of `age_s`


class Access:
    """How one process has a disk open. The parts of a log share it, and it leads to none of them.

    An event leads to the cursors with which it is acknowledged, and the garbage collector does not see events.
    """

    __slots__ = ("_ended_before", "disk", "is_closed", "later", "read_only", "stopped", "time_ns")

    def __init__(self, disk: Disk, later: Later, time_ns: Callable[[], int], read_only: bool) -> None:
        self.disk, self.later, self.time_ns, self.read_only = disk, later, time_ns, read_only
        self.is_closed = False
        self.stopped: LogWriterFailed | None = None
        self._ended_before = disk.processes_ended

    @property
    def is_dead(self) -> bool:
        """Whether the process was killed. The rest of its last step has no effect."""
        return self._ended_before != self.disk.processes_ended

    def is_writable(self) -> bool:
        """Return whether writes have an effect. Raises `LogFull` if the disk takes none now."""
        if self.disk.full and not self.is_dead:
            raise LogFull(self.disk.name)
        return not self.is_dead

    def check_running(self) -> None:
        """Raise the error that stopped the writer, if one did."""
        if self.stopped is not None:
            raise renewed(self.stopped)


class SimLog:
    """A log on a simulated disk. `later` calls on the log's thread, and never after the process was killed."""

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
        self._notices: deque[Callable[[], None]] = deque()  # of commits whose callers do not know yet
        self._access = access = Access(disk, later, time_ns, read_only)
        self._cursors = SimCursors(access, chance, owner)
        self._positions = SimPositions(access)
        self._schemas = SimSchemas(access)
        self._reader: tuple[str, int] | None = None
        if not read_only:
            with disk.lock:
                if disk.writer_pid is not None:
                    raise LogLocked(disk.name, disk.writer_pid, here=disk.writer_pid == pid)
                disk.writer_pid = pid
            if not disk.is_resumed:
                self.begin_incarnation()
            disk.is_resumed = False
            self._pruned_at = disk.head
            if retention is not None:
                later(PRUNE_S, self._prune_periodically)

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
        """The identity of this history; 0 if the log is opened read-only."""
        return 0 if self.read_only else self.disk.log_id

    @property
    def writer_id(self) -> int:
        """The same as `log_id`, because one process writes this log."""
        return self.log_id

    @property
    def lineage(self) -> Lineage:
        """The incarnations of this log."""
        with self.disk.lock:
            return self.disk.lineage

    def begin_incarnation(self) -> Incarnation:
        """Begin another incarnation, after everything that was appended."""
        disk = self.disk
        if self.read_only:
            raise LogReadOnly(self.path)
        with disk.lock:
            self._flush()
            following = disk.offset_of(len(disk.rows))
            begun = Incarnation(self._chance.getrandbits(61) | 1, following, self._time_ns(), self._owner)
            disk.incarnations.append(begun)
            return begun

    def digest(self, offset: int) -> bytes:
        """Return the digest of the events up to an offset."""
        with self.disk.lock:
            return self.disk.digests[offset] if 0 <= offset < len(self.disk.digests) else b""

    @property
    def is_fork(self) -> bool:
        """Always False: a simulated log is not forked."""
        return False

    def backup(
        self,
        target: str,
        progress: Callable[[int, int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> Backup:
        """Raise `LogError`: a world copies a disk with its own actions."""
        raise LogError("a simulated log has no backups: copy its disk with the actions of the world")

    def purge(self, keys: KeySet, progress: Callable[[int], None] | None = None) -> Purged:
        """Remove all events of some keys, in one step."""
        disk = self.disk
        if self.read_only:
            raise LogReadOnly(self.path)
        with disk.lock:
            self._access.check_running()
            if not self._access.is_writable():
                return Purged(0, disk.head)
            behind = [
                name
                for name, cursor in sorted(disk.cursors.items())
                if any(row.key in keys and row.key in KeySet(cursor.keys) for _, row in disk.stored(cursor.offset))
            ]
            removed = disk.purge(lambda _, row: row.key in keys)
            if disk.real is not None:
                disk.real.purged(keys, removed)
            if progress is not None and removed:
                progress(removed)
            shown = {"path": self.path, "keys": list(keys.expressions), "durables": behind}
            record("LOG_PURGED", logging.WARNING, events=removed, until=disk.head, **shown)
            return Purged(removed, disk.head, tuple(behind))

    def append(self, rows: Sequence[Row], done: Appended, about: Any = None) -> None:
        """Queue rows for the next commit."""
        if self.read_only:
            return done(AppendResult(about, Refused(LogReadOnly(self.path))))
        with self.disk.lock:
            if self._access.is_closed:
                return done(AppendResult(about, Refused(LogError(f"{self.path} is closed"))))
            self._appends.append((rows, done, about))
            if any(row.provenance is not None for row in rows):
                self.disk.point("received")
            if not self._batch and not self._access.is_dead:
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
            last = max(after, min(end, after + SCANNED_EVENTS))
            for offset, row in disk.stored(after, last):
                if row.key in keys and _in_time(row, span):
                    found.append((offset, row))
                    if len(found) == limit:
                        covered = offset
                        break
            else:
                covered = last
                if last == end and span.until is not None:
                    covered = max(covered, min(span.until, head))
            page = SimPage(found, covered, low_water, disk.corrupt.copy() if disk.corrupt else set())
            return page if disk.real is None else disk.real.page(page, keys, span, limit, low_water)

    def head(self) -> int:
        """Return the last committed offset."""
        return self.disk.head

    def hold(self, reader: tuple[str, int] | None) -> None:
        """Let retention keep the events after an offset for a reader."""
        self._reader = reader

    def low_water(self) -> int:
        """Return the offset up to which retention removed every event."""
        return self.disk.low_water

    def removed_until(self) -> int:
        """Return 0: nothing is removed from the middle."""
        return 0

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
            after = head
            for offset, row in disk.stored(max(span.after, low_water)):
                if row.published_at >= span.from_ns:
                    after = self.before(offset)
                    break
            return span._replace(after=max(span.after, after), until=until)

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
        with self.disk.lock:
            if self._access.is_closed or self._access.is_dead:
                return
            self._access.is_closed = True
            self._cursors.close()
            if not self.read_only:
                self._flush()
                while self._notices:
                    self._notify_next()
                self.disk.writer_pid = None
                self.disk.store_positions({}, sync=True)

    def _flush(self) -> None:
        """Store what was appended, now."""
        for batch in (self._batch, self._appends):
            if batch:
                self._commit(batch)
                if not self._access.is_closed:
                    self._later(self.disk.notify_s[1], self._notify_next)
        self._batch, self._appends = [], []

    def forget(self) -> None:
        """Drop what waits for a commit: the world has ended."""
        self._batch, self._appends = [], []
        self._notices.clear()

    # On the log's thread.

    def _begin(self) -> None:
        """Write what was appended, and sync it some time later."""
        self._batch, self._appends = self._appends, []
        self.disk.writing = [row for rows, _, _ in self._batch for row in rows]
        low, high = self.disk.fsync_s
        self._later(low + self._chance.random() * (high - low), self._synced)

    def _synced(self) -> None:
        with self.disk.lock:
            if self._access.is_closed or self._access.is_dead:
                return
            batch, self._batch = self._batch, []
            self._commit(batch)
            self.disk.point("committed")
            if self._access.is_dead:
                return
            low, high = self.disk.notify_s
            self._later(low + self._chance.random() * (high - low), self._notify_next)
            if self._appends:
                self._begin()

    def _commit(self, appends: Sequence[Append]) -> None:
        """Store appends in one transaction. Their callers are notified later."""
        tail = self._tail  # a tail that begins after this commit does not get it
        outcomes, committed = self._store(appends)
        self.disk.writing = ()
        if self.disk.head - self._pruned_at >= PRUNE_EVENTS:
            self._prune()

        def notify() -> None:
            if committed is not None and tail is not None:
                tail(committed)
            for (_, done, about), outcome in zip(appends, outcomes, strict=True):
                done(AppendResult(about, outcome))

        self._notices.append(notify)

    def _notify_next(self) -> None:
        """Notify the callers of the oldest commit: delays differ, and the order of commits is kept."""
        with self.disk.lock:
            if self._notices:
                self._notices.popleft()()

    def _store(self, appends: Sequence[Append]) -> tuple[list[Outcome], Committed | None]:
        disk = self.disk
        chance, stores = self._chance, True
        failed: Refused | Unknown | None = None
        if self._access.stopped is not None:
            failed, stores = Refused(renewed(self._access.stopped)), False
        elif disk.full:
            failed, stores = Refused(LogFull(self.path)), False
        elif disk.refuse_p and chance.random() < disk.refuse_p:
            failed, stores = Refused(LogError(f"{self.path}: the database is locked")), False
        elif disk.unknown_p and chance.random() < disk.unknown_p:
            failed, stores = Unknown(LogError(f"{self.path}: the disk did not reply")), chance.random() < 0.5
        elif disk.broken_p and chance.random() < disk.broken_p:
            self._access.stopped = stopped = LogWriterFailed(self.path, "a write or fsync failed: SQLITE_IOERR_FSYNC")
            failed, stores = Unknown(renewed(stopped)), chance.random() < 0.5
        outcomes: list[Outcome] = []
        rows_stored: list[Row] = []
        offsets_stored: list[int] = []
        for rows, _, _ in appends:
            if stores:
                stored, new, new_offsets = disk.store(rows)
                rows_stored += new
                offsets_stored += new_offsets
                outcomes.append(stored)
        if failed is not None:
            failed.error.outcome = "refused" if isinstance(failed, Refused) else "unknown"
            outcomes = [failed] * len(appends)
        return outcomes, Committed(rows_stored, offsets_stored) if rows_stored else None

    def _prune_periodically(self) -> None:
        with self.disk.lock:
            if not self._access.is_closed and not self._access.is_dead:
                self._prune()
                self._later(PRUNE_S, self._prune_periodically)

    def _prune(self) -> None:
        """Remove what retention does not keep."""
        rules, disk = self._retention, self.disk
        self._pruned_at = disk.head
        if rules is not None:
            if rules.keys:
                self._prune_by_key(rules)
            disk.trim(self._prunable(rules))

    def _prune_by_key(self, rules: Retention) -> None:
        """Remove events that are too old for their keys, from the middle."""
        ages = {age_s for _, age_s in rules.keys if age_s is not None} | {rules.age_s or 0.0}
        until = {age_s: self._held(rules, self._too_old_until(age_s)) for age_s in ages if age_s}
        sets = [(KeySet([expression]), age_s) for expression, age_s in rules.keys]

        def is_too_old(offset: int, row: Row) -> bool:
            age_s = next((age_s for keys, age_s in sets if row.key in keys), rules.age_s)
            return age_s is not None and offset <= until[age_s]

        self.disk.purge(is_too_old)

    def _too_old_until(self, age_s: float) -> int:
        """Return the offset before the first event that is not older than this."""
        cutoff = self._time_ns() - int(age_s * 1e9)
        young = (offset for offset, row in self.disk.stored() if row.published_at >= cutoff)
        return self.before(next(young, self.disk.head + 1))

    def _held(self, rules: Retention, target: int) -> int:
        """Reduce an offset to what cursors and a reader permit."""
        if rules.ignore_cursors:
            return target
        held = [cursor.offset for cursor in self.disk.cursors.values()]
        held += [] if self._reader is None else [self._reader[1]]
        return max(self.disk.low_water, min([target, *held]))

    def _prunable(self, rules: Retention) -> int:
        """Return the offset up to which events may be removed."""
        disk = self.disk
        target, stored = disk.low_water, [offset for offset, _ in disk.stored()]
        if rules.events is not None and len(stored) > rules.events:
            target = max(target, self.before(stored[-rules.events]) if rules.events else disk.head)
        if rules.age_s is not None and not rules.keys:
            target = max(target, self._too_old_until(rules.age_s))
        if rules.keys:  # what was removed completely
            target = max(target, self.before(stored[0]) if stored else disk.head)
        if rules.size_bytes is not None and stored and disk.size_bytes > rules.size_bytes:
            excess = (disk.size_bytes - rules.size_bytes) / (disk.size_bytes / len(stored))
            target = max(target, stored[min(len(stored), int(excess) + 1) - 1])
        return self._held(rules, target)

    def _look(self) -> None:
        if self._access.is_closed or self._access.is_dead or self._watched is None:
            return
        head = self.disk.head
        if head != self._shown:
            self._shown = head
            self._watched(head)
        self._later(0.005, self._look)


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


LEASE_LOST = "the subscription was closed, or another subscriber has its lease"
Advanced = tuple[str, str, int, Callable[[ZbusError | None], None] | None]  # name, token, offset, and `done`


class SimCursors:
    """The cursors of one disk, as one process uses them."""

    def __init__(self, access: Access, chance: Random, owner: str) -> None:
        self._access, self._disk, self._time_ns = access, access.disk, access.time_ns
        self._chance, self._owner = chance, owner
        self._held: dict[str, str] = {}  # by name: the token of the lease of this process
        self._pending: list[Advanced] = []

    def claim(self, name: str, keys: Sequence[str], start: int) -> Lease:
        """Take the lease of `name`."""
        if not isinstance(name, str) or not name or len(name) > NAME_MAX or not name.isprintable():
            raise CursorError(str(name), f"a durable name must have 1 to {NAME_MAX} printable characters")
        disk = self._disk
        with disk.lock:
            if name in disk.leases:
                reason = "holds its lease; a durable subscription has one subscriber at a time"
                raise CursorError(name, f"{disk.leases[name].owner} {reason}")
            before = disk.cursors.get(name)
            if before is not None and not _is_usable(before, disk):
                reason = f"its position, {before.offset}, is not in the history of the log, which ends at {disk.head}"
                raise CursorError(name, f"{reason}. Reset or delete it")
            if not self._access.is_writable():
                return Lease("", start if before is None else before.offset, ())
            self._held[name] = token = self._chance.randbytes(16).hex()
            disk.leases[name] = Held(token, self._owner)
            offset, updated_at = (start, self._time_ns()) if before is None else (before.offset, before.updated_at_ns)
            disk.cursors[name] = CursorState(offset, tuple(keys), updated_at, disk.lineage.of(offset) or 0)
            lease = Lease(token, offset, () if before is None else before.keys)
            if disk.real is not None:
                disk.real.claimed(name, keys, start, lease)
            return lease

    def advance(
        self, name: str, token: str, offset: int, done: Callable[[ZbusError | None], None] | None = None
    ) -> None:
        """Queue a position."""
        with self._disk.lock:
            if self._access.is_closed:
                if done is not None:
                    done(LogError(f"{self._disk.name} is closed; the position of {name!r} was not stored"))
                return
            self._pending.append((name, token, offset, done))
            if len(self._pending) == 1:
                low, high = self._disk.fsync_s
                self._access.later(low + self._chance.random() * (high - low), self.flush)

    def flush(self) -> LogError | None:
        """Store the positions that wait. Returns the error if they are not stored."""
        with self._disk.lock:
            pending, self._pending = self._pending, []
            try:
                if not pending or not self._access.is_writable():
                    return None
            except LogError as failed:
                # The positions are stored later, although their callers get an error.
                self._pending = [(name, token, offset, None) for name, token, offset, _ in pending]
                if not self._access.is_closed:
                    self._access.later(RETRY_S, self.flush)
                for _, _, _, done in pending:
                    if done is not None:
                        done(renewed(failed))
                return failed
            for name, token, offset, done in pending:
                is_held = self._store(name, token, offset)
                if done is not None:
                    done(None if is_held else CursorError(name, f"{LEASE_LOST}; the position was not stored"))
            self._disk.point("acknowledged")
            return None

    def _store(self, name: str, token: str, offset: int) -> bool:
        """Store one position. Returns whether its lease is still held."""
        held, cursor = self._disk.leases.get(name), self._disk.cursors.get(name)
        if held is None or held.token != token or cursor is None:
            record_reason("LEASE_LOST", logging.WARNING, code="lease_lost", reason=LEASE_LOST, durable=name)
            return False
        if offset > cursor.offset:
            stored_by = self._disk.lineage.of(offset) or 0
            self._disk.cursors[name] = CursorState(offset, cursor.keys, self._time_ns(), stored_by)
        if self._disk.real is not None:
            self._disk.real.advanced(name, offset)
        return True

    def release(self, name: str, token: str) -> None:
        """Store the pending positions and release the lease, even if they cannot be stored."""
        with self._disk.lock:
            failed = self.flush()
            self._release(name, token)
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Store the pending positions and release all leases of this process."""
        self.flush()
        for name, token in list(self._held.items()):
            self._release(name, token)

    def _release(self, name: str, token: str) -> None:
        if self._held.get(name) == token:
            del self._held[name]
        held = self._disk.leases.get(name)
        if held is not None and held.token == token and not self._access.is_dead:
            del self._disk.leases[name]
            if self._disk.real is not None:
                self._disk.real.released(name)

    def list(self) -> Sequence[Cursor]:
        """Return every cursor, by name."""
        with self._disk.lock:
            leases = self._disk.leases
            return [
                Cursor(
                    name,
                    each.offset,
                    each.keys,
                    each.updated_at_ns,
                    leases[name].owner if name in leases else None,
                    each.incarnation,
                )
                for name, each in sorted(self._disk.cursors.items())
            ]

    def reset(self, name: str, offset: int) -> None:
        """Move a cursor."""
        with self._disk.lock:
            cursor = self._unused(name)
            if self._access.is_writable():
                stored_by = self._disk.lineage.of(offset) or 0
                self._disk.cursors[name] = CursorState(offset, cursor.keys, self._time_ns(), stored_by)
                if self._disk.real is not None:
                    self._disk.real.moved(name, offset)

    def delete(self, name: str) -> None:
        """Delete a cursor."""
        with self._disk.lock:
            self._unused(name)
            if self._access.is_writable():
                del self._disk.cursors[name]
                if self._disk.real is not None:
                    self._disk.real.moved(name, None)

    def _unused(self, name: str) -> CursorState:
        cursor = self._disk.cursors.get(name)
        if cursor is None:
            raise CursorError(name, "there is no such cursor")
        if name in self._disk.leases:
            raise CursorError(name, f"{self._disk.leases[name].owner} uses it; stop that process first")
        return cursor


class SimPositions:
    """Named positions on one disk."""

    def __init__(self, access: Access) -> None:
        self._access, self._disk = access, access.disk

    def load(self) -> dict[str, int]:
        """Return all positions by name."""
        with self._disk.lock:
            return dict(self._disk.positions)

    def repair(self) -> Sequence[str]:
        """Remove nothing: a disk of the simulator loses positions, but does not change them."""
        return ()

    def store(self, changed: Mapping[str, int]) -> None:
        """Store positions."""
        with self._disk.lock:
            if self._access.is_writable():
                self._disk.store_positions(changed)
                self._disk.point("position stored")

    def remove(self, names: Collection[str]) -> None:
        """Remove positions."""
        with self._disk.lock:
            if self._access.is_writable():
                self._disk.remove_positions(names)


class SimSchemas:
    """The schemas on one disk."""

    def __init__(self, access: Access) -> None:
        self._access, self._disk = access, access.disk

    def load(self) -> Sequence[Schema]:
        """Return all versions, by expression and version."""
        with self._disk.lock:
            return sorted(self._disk.schemas, key=lambda each: (each.expression, each.version))

    def store(self, schema: Schema) -> None:
        """Store one more version. Raises `LogError` if this version exists."""
        disk = self._disk
        if self._access.read_only:
            raise LogReadOnly(disk.name)
        with disk.lock:
            self._access.check_running()
            if any((each.expression, each.version) == (schema.expression, schema.version) for each in disk.schemas):
                raise LogError(f"{disk.name}: version {schema.version} of the schema of {schema.expression!r} exists")
            if self._access.is_writable():
                disk.schemas.append(schema)
                if disk.real is not None:
                    disk.real.schema_stored(schema)


def _is_usable(cursor: CursorState, disk: Disk) -> bool:
    """Return whether the event at a position is the one that was acknowledged."""
    until = disk.lineage.until(cursor.incarnation)
    known = cursor.offset == 0 or (until is not None and cursor.offset <= until)
    return known and cursor.offset <= disk.head


def _in_time(row: Row, span: Span) -> bool:
    return (span.from_ns is None or row.published_at >= span.from_ns) and (
        span.to_ns is None or row.published_at <= span.to_ns
    )


if TYPE_CHECKING:
    _port: type[Log] = SimLog
    _cursors: type[Cursors] = SimCursors
    _positions: type[Positions] = SimPositions
    _schemas: type[SchemaStore] = SimSchemas
