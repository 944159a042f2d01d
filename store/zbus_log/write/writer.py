"""The single writer of a log: a thread that commits queued appends in batches and seals full blocks.

Batches form without a timer: while one is synced to disk, the next one gathers. Each batch is one
statement, and so one transaction and one sync. A batch with a new key uses an explicit transaction,
so that the key and its first event are stored together. So does an append that is too large for one
statement: a statement copies its payloads, and SQLite limits the size of a parameter.

The event loop and the writer share the interpreter lock, which the writer needs before and after
each statement but not during it. So if much is queued, the writer takes half of it, starts the
statement, and only then has the callers of the previous commit notified: they publish again while
the statement runs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from zbus.errors import LogDamaged, LogError, LogFull, LogWriterFailed, renewed
from zbus.observe.records import record
from zbus.ports.lineage import Incarnation
from zbus.ports.log import Appended, AppendResult, Committed, Refused, Row, Stored, Unknown
from zbus.util.memo import Memo
from zbus.util.run_id import inherit
from zbus_log.file.block_index import store_checksums
from zbus_log.file.chain import Chain
from zbus_log.file.checksum import NamedKey, key_number
from zbus_log.file.database import (
    SQLITE_ERRORS,
    WAL_BYTES,
    as_log_error,
    lengthen_wal,
    log_errors,
    roll_back,
    transaction,
)
from zbus_log.file.head_record import DISK_FULL, RESERVE, Head, HeadRecord
from zbus_log.file.incarnations import add_incarnation, new_incarnation
from zbus_log.file.removed import drop_passed
from zbus_log.file.rows import encode_rows, is_encodable, size_of, split_rows
from zbus_log.file.tables import BLOCK

from .checkpoints import WriteAheadLog
from .commit_notifier import CommitNotifier, Notice
from .identities import Sorted, StoredIdentities

COMMIT_ROWS_MIN = 128
COMMIT_ROWS_MAX = 4096
COMMIT_BYTES_MAX = 16 * 1024 * 1024  # of payloads and headers, unless a single append has more
COMMIT_OVERHEAD = 64 * 1024  # of bytes in the write-ahead log, about
STATEMENT_BYTES_MAX = 16 * 1024 * 1024  # unless a single row has more; at least what a commit may have
KEYS_KEPT_MAX = 200_000
SEAL_LAG_BLOCKS_MAX = 8
IDLE_S = 15.0

_SEAL = (
    "INSERT INTO by_key SELECT ?1, key, json_group_array(offset) FROM events "
    "WHERE offset BETWEEN ?2 AND ?3 GROUP BY key",
    "INSERT INTO runs SELECT ?1, publisher, min(sequence), max(sequence) FROM events "
    "WHERE offset BETWEEN ?2 AND ?3 GROUP BY publisher",
    "INSERT INTO publishers (publisher, first_block, last_block, last_sequence) "
    "SELECT publisher, block, block, last_sequence FROM runs WHERE block = ?1 AND ?2 <= ?3 "
    "ON CONFLICT (publisher) DO UPDATE SET last_block = excluded.last_block, "
    "last_sequence = max(last_sequence, excluded.last_sequence)",
    "INSERT INTO blocks (block, events, bytes, published_min, published_max) "
    "SELECT ?1, count(*), ifnull(sum(length(payload)), 0), min(published_at), max(published_at) "
    "FROM events WHERE offset BETWEEN ?2 AND ?3",
)
_SEAL_DIGEST = "UPDATE blocks SET digest = ?2 WHERE block = ?1"

Append = tuple[Sequence[Row], Appended, Any]
Task = Callable[[], None]


class _End:
    """Marks the end of the queue."""


_END = _End()


class _OutcomeUnknown(Exception):
    """Raised when a commit failed and it is unknown whether it was stored."""

    def __init__(self, error: LogError) -> None:
        super().__init__(str(error))
        self.error = error


class Writer:
    """Owns the head record and the only connection that writes, and closes both when it ends, however late that is.

    `submit` does not block; each `done` is called once.
    """

    def __init__(
        self,
        path: str,
        connection: Connection,
        head_record: HeadRecord,
        synchronous: str,
        start_after: int,
        incarnation: Incarnation,
        periodic: Callable[[], None] | None,
        periodic_events: int = BLOCK,
        is_whole: Callable[[int, int], bool] = lambda _first, _last: True,
    ) -> None:
        self.path, self._connection, self._record = path, connection, head_record
        self._synchronous = synchronous
        state = head_record.current
        assert state is not None
        self.head, self._state = state.head, state
        self._next = start_after + 1
        self._opened_at, self._is_whole = start_after, is_whole  # whether events that were there before are not damaged
        self._tailed = start_after  # the tail has received every event up to this offset
        self._periodic, self._periodic_events = periodic, periodic_events
        self._periodic_at = self.head  # the head when it last ran
        self._sealed = self._last_sealed()
        self._incarnation: Incarnation | None = incarnation  # until it is in the log
        self._incarnation_id = incarnation.id  # of the events that are stored now
        self.chain: Chain | None = None  # from the first commit at the latest
        self._leaves = b""  # of the last rows that were encoded
        self._unrecorded: LogError | None = None  # why the head record is behind the log
        self._key_ids = Memo[str, NamedKey](KEYS_KEPT_MAX)
        self._identities = StoredIdentities(connection, self._sealed_until)
        self._stopped: LogWriterFailed | None = None  # never raised itself: its traceback would keep rows for good
        self._deferred: list[Notice] = []  # of the last commit, not delivered yet
        self._notifier = CommitNotifier()
        self._due = time.monotonic() + IDLE_S
        self._ended, self._closed_because = False, "is closed"
        self._wal = WriteAheadLog(path, connection)
        self._inbox: SimpleQueue[Append | Task | _End] = SimpleQueue()
        self._gathered_bytes = 0  # of the appends that are being committed
        self._unchecked_bytes = 0  # written, about, since the length of the write-ahead log was checked
        self._postponed: Append | None = None  # taken from the inbox, but too large for the commit that gathered
        self._thread = threading.Thread(target=inherit(self._run), name="zbus-log-writer", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Row], done: Appended, about: Any = None) -> None:
        """Queue rows for the next commit."""
        if self._ended:
            done(AppendResult(about, self._refused()))
        else:
            self._inbox.put((rows, done, about))

    def run(self, task: Callable[[], None]) -> None:
        """Queue other work that writes, such as retention and schemas."""
        self._inbox.put(task)

    def tail(self, committed: Callable[[Committed], None]) -> int:
        """Call `committed` with every event stored from now on. Returns the current head."""
        self._notifier.tail = committed
        return self.head

    def forget_keys(self, names: Iterable[str]) -> None:
        """Forget the ids of keys that were removed. Call it on the writer's thread."""
        for name in names:
            self._key_ids.pop(name, None)

    def remove_from_wal(self) -> None:
        """Remove what a purge removed from the write-ahead log too. Call it on the writer's thread."""
        self._wal.empty()

    @property
    def checkpoint_failures(self) -> int:
        """How many checkpoints failed since the log was opened."""
        return self._wal.failures

    @property
    def connection(self) -> Connection:
        """The only connection that writes, for tasks that `run` executes."""
        return self._connection

    def _refused(self) -> Refused:
        return _refused(LogError(f"{self.path} {self._closed_because}"))

    def forked(self, parent: int) -> None:
        """Refuse every append in a forked process, which does not have the writer's thread."""
        self._ended = True
        self._closed_because = f"belongs to process {parent}, from which this process was forked"

    def check_running(self) -> None:
        """Raise the error that stopped the writer, if one did."""
        if self._stopped is not None:
            raise renewed(self._stopped)

    def close(self, timeout_s: float) -> bool:
        """Commit what was submitted and stop. Returns False if that takes longer than `timeout_s` seconds."""
        self._ended = True
        self._inbox.put(_END)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs on the writer's thread.

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._wal.checkpoint()  # closing does it too, but keeps its errors to itself
            self._connection.close()
            self._attempt(self._record.close)

    def _serve(self) -> None:
        self._attempt(self._begin)
        self._attempt(lambda: lengthen_wal(self.path))
        task: Task | _End | None = None
        while task is not _END:
            appends, task = self._gather()
            if appends:
                try:
                    self._commit(appends)
                except Exception as error:  # a defect in this code: stop writing, but let no caller wait forever
                    record("LOG_WRITER_FAILED", logging.CRITICAL, error, path=self.path)
                    self._stopped = LogWriterFailed(self.path, f"unexpected {error!r}")
                    failed = _unknown(renewed(self._stopped))
                    self._notifier.now([(done, about, failed, None) for _, done, about in appends])
                self._unchecked_bytes += self._gathered_bytes + COMMIT_OVERHEAD
                if self._unchecked_bytes > WAL_BYTES:
                    self._unchecked_bytes = 0
                    self._wal.check()
            if callable(task):
                self._attempt(task)
            elif self.head - self._periodic_at >= self._periodic_events and self._periodic and self._inbox.empty():
                self._attempt_periodic(self._periodic)  # in a busy log, after the next block
            if self.head // BLOCK - 1 > self._sealed and task is not _END:
                self._seal_full_blocks()
            if self._wal.empty_in_s is not None:
                self._attempt(self._wal.empty_if_due)
        self._notify_deferred()
        self._notifier.close()
        while not self._inbox.empty():  # submitted while the writer was closing
            item = self._inbox.get_nowait()
            if isinstance(item, tuple):
                item[1](AppendResult(item[2], self._refused()))

    def _gather(self) -> tuple[list[Append], Task | _End | None]:
        """Return the appends to commit next, and the task (or the end) that follows them. Waits if the queue is empty.

        If many are queued, take about half, so that the loop and the log work at the same time: while one half is
        written, the publishers of the other half are notified and publish again.
        """
        if self._periodic is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + IDLE_S
            self._attempt_periodic(self._periodic)
        inbox, appends = self._inbox, list[Append]()
        postponed, self._postponed = self._postponed, None
        if self._deferred and postponed is None and inbox.empty():
            self._notify_deferred()
        rows = size = 0
        half = inbox.qsize() // 2
        try:
            item: Append | Task | _End = inbox.get(timeout=self._wait_s()) if postponed is None else postponed
            while isinstance(item, tuple):
                try:
                    more = size_of(item[0])
                except TypeError:  # a payload without a length: it is refused when it is encoded
                    more = 0
                if appends and size + more > COMMIT_BYTES_MAX:
                    self._postponed = item
                    return appends, None
                appends.append(item)
                rows += len(item[0])
                self._gathered_bytes = size = size + more
                enough = rows >= COMMIT_ROWS_MIN and len(appends) >= half
                if enough or rows >= COMMIT_ROWS_MAX or size >= COMMIT_BYTES_MAX:
                    return appends, None
                item = inbox.get_nowait()
            return appends, item
        except Empty:
            return appends, None

    def _wait_s(self) -> float | None:
        """Return how long to wait if the queue is empty; None: until something is submitted."""
        until_s = max(0.0, self._due - time.monotonic()) if self._periodic else None
        due_s = [each for each in (until_s, self._wal.empty_in_s) if each is not None]
        return min(due_s, default=None)

    def _commit(self, appends: list[Append]) -> None:
        """Store all appends in one transaction. Notifies each of its outcome, and the tail of the new events."""
        batch = appends[0][0] if len(appends) == 1 else [row for rows, _, _ in appends for row in rows]
        failed: Refused | Unknown
        notices: list[Notice] = []
        try:
            self.check_running()
            fresh, offsets, conflicts = self._store(batch)
        except _OutcomeUnknown as unknown:
            failed = _unknown(unknown.error)
        except LogError as error:
            failed = _refused(error)
        except Exception as error:
            if self._refuse_malformed(appends, error):
                return
            # A defect in this code: stop writing, but let no caller wait forever.
            record("LOG_WRITER_FAILED", logging.CRITICAL, error, path=self.path)
            self._stopped = LogWriterFailed(self.path, f"unexpected {error!r}")
            failed = _unknown(renewed(self._stopped))
        else:
            at = 0
            for rows, done, about in appends:
                part = offsets[at : at + len(rows)]
                if fresh is batch:
                    notices.append((done, about, Stored(part), Committed(rows, part)))
                else:
                    theirs = {index - at: key for index, key in conflicts.items() if at <= index < at + len(rows)}
                    notices.append((done, about, *self._new_of(rows, part, theirs)))
                at += len(rows)
            if self._unrecorded is not None:  # stored, but the loss of these events could not be detected
                why = self._unrecorded
                notices = [(done, about, _unknown(renewed(why)), new) for done, about, _, new in notices]
        if not notices:
            notices = [(done, about, failed, None) for _, done, about in appends]
        if self._deferred:
            self._notify_deferred()
        if self._inbox.empty() and self._postponed is None:
            self._notifier.now(notices)
        else:  # notify while the next batch is being written
            self._deferred = notices

    def _refuse_malformed(self, appends: list[Append], error: Exception) -> bool:
        """Refuse the appends with a row that cannot be encoded, and commit the others. Returns False if none has one.

        Such a row raises before anything of its commit is stored.
        """
        malformed = [append for append in appends if not is_encodable(append[0])]
        if not malformed:
            return False
        roll_back(self._connection)
        self._identities.forget()
        reason = f"{self.path}: an event cannot be encoded ({error or type(error).__name__})"
        self._notifier.now([(done, about, _refused(LogError(reason)), None) for _, done, about in malformed])
        others = [append for append in appends if append not in malformed]
        if others:
            self._commit(others)
        return True

    def _new_of(
        self, rows: Sequence[Row], offsets: Sequence[int], conflicts: Mapping[int, str]
    ) -> tuple[Stored, Committed | None]:
        """Return the outcome of an append with repeated rows, and its new rows for the tail."""
        fresh: dict[int, Row] = {}
        repeated: set[int] = set()
        for index, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
            if offset > self._tailed:
                fresh[offset] = row
                self._tailed = offset
            else:
                repeated.add(index)
        return Stored(offsets, repeated, conflicts), Committed(list(fresh.values()), list(fresh)) if fresh else None

    def _notify_deferred(self) -> None:
        if self._deferred:
            deferred, self._deferred = self._deferred, []
            self._notifier.soon(deferred)

    def _store(self, batch: Sequence[Row]) -> Sorted:
        """Store the new rows of a batch. Returns these rows, and the offset of every row of the batch."""
        first = self._next
        if self._unrecorded is not None:
            self._record_head()
            if self._unrecorded is not None:
                raise renewed(self._unrecorded)
        try:
            chain = self.chain or self._begin()
            found = self._identities.sort(batch, first)
        except SQLITE_ERRORS as error:
            raise as_log_error(self.path, error, writing=True) from error
        fresh = found.fresh
        if not fresh:
            return found
        last = first + len(fresh) - 1
        try:
            if last > self._state.reserved:
                self._reserve(last)
            self._insert(fresh, first)
        except IntegrityError as error:  # this writer assigns every offset once, so another one has used these
            self._after_failure(LogWriterFailed(self.path, f"another process writes to it: {error.orig}"), fresh, first)
        except SQLITE_ERRORS as error:
            self._after_failure(as_log_error(self.path, error, writing=True), fresh, first)
        except LogError as error:
            self._after_failure(error, fresh, first)
        if fresh is batch:
            self._tailed = last
        self.head = last
        self._next = last + 1
        chain.add(first, self._leaves)
        state = self._state
        self._state = Head(state.epoch, last, state.reserved, self._incarnation_id)
        self._record_head()
        return found

    def _record_head(self) -> None:
        """Update the head record. If that fails, the next append tries it again before it stores anything."""
        try:
            self._record.update(self._state)
            self._unrecorded = None
        except OSError as error:
            self._unrecorded = self._head_error(error)

    def _head_error(self, error: OSError) -> LogError:
        if error.errno in DISK_FULL:
            return LogFull(self.path)
        return LogError(f"{self.path}: the head record cannot be written: {error}")

    def _insert(self, rows: Sequence[Row], first: int) -> None:
        key_ids = self._key_ids
        parts = (rows,) if self._gathered_bytes <= STATEMENT_BYTES_MAX else split_rows(rows, STATEMENT_BYTES_MAX)
        if len(parts) == 1:
            try:
                statement, parameters, self._leaves = encode_rows(rows, first, key_ids)
            except KeyError:
                pass  # some keys are new, or are no longer in the memo
            else:
                if self._deferred:
                    self._notify_deferred()
                self._connection.exec_driver_sql(statement, parameters)
                return
        used = {row.key for row in rows}
        for name in used:
            name.encode()  # raises for what SQLite would store as another key, or not at all
        known = {name: key_ids[name] for name in used if name in key_ids}
        names = json.dumps(sorted(used - known.keys()))
        with transaction(self._connection):
            self._connection.exec_driver_sql(
                "INSERT INTO keys (key) SELECT value FROM json_each(?1) WHERE value NOT IN (SELECT key FROM keys)",
                (names,),
            )
            # The index of keys, which is searched, and their table, which readers use, must agree.
            found = self._connection.exec_driver_sql(
                "SELECT found.key, found.id, stored.key FROM keys AS found LEFT JOIN keys AS stored"
                " ON stored.id = found.id WHERE found.key IN (SELECT value FROM json_each(?1))",
                (names,),
            ).all()
            added = {name: NamedKey(id_, key_number(name)) for name, id_, stored in found if stored == name}
            if not added.keys() | known.keys() >= used:
                raise LogDamaged(self.path, "the table of keys is damaged")
            known |= added
            leaves: list[bytes] = []
            for part in parts:
                statement, parameters, part_leaves = encode_rows(part, first, known)
                self._connection.exec_driver_sql(statement, parameters)
                leaves.append(part_leaves)
                first += len(part)
            self._leaves = b"".join(leaves)
        key_ids.update(added)

    def _after_failure(self, error: LogError, rows: Sequence[Row], first: int) -> None:
        """Return if the failed commit was stored after all; otherwise raise its error, or `_OutcomeUnknown`."""
        if isinstance(error, LogWriterFailed | LogDamaged):
            cause = error.cause if isinstance(error, LogWriterFailed) else str(error)
            self._stopped = LogWriterFailed(self.path, cause)
            raise _OutcomeUnknown(renewed(self._stopped)) from error
        try:
            roll_back(self._connection)
            self._identities.forget()
            stored = self._connection.exec_driver_sql(
                "SELECT publisher, sequence FROM events WHERE offset BETWEEN ? AND ? ORDER BY offset",
                (first, first + len(rows) - 1),
            ).all()
        except SQLITE_ERRORS as failed:  # the outcome cannot be looked up either
            raise _OutcomeUnknown(as_log_error(self.path, failed, writing=True)) from failed
        if stored != [(row.publisher_id, row.sequence) for row in rows]:
            raise error

    # The head record, incarnations and sealing.

    def _begin(self) -> Chain:
        """Store the incarnation of this opening, which the first commit then syncs to disk, and read the chain."""
        if self._incarnation is not None:
            with self._synchronizing("NORMAL"), transaction(self._connection):
                add_incarnation(self._connection, self._incarnation)
            self._incarnation = None
        self.chain = Chain(self._connection, self.head)
        return self.chain

    @contextmanager
    def _synchronizing(self, how: str) -> Iterator[None]:
        """Sync transactions in another way than usual."""
        self._connection.exec_driver_sql(f"PRAGMA synchronous={how}")
        try:
            yield
        finally:
            self._connection.exec_driver_sql(f"PRAGMA synchronous={self._synchronous}")

    def begin_incarnation(self) -> Incarnation:
        """Begin an incarnation with the next offset. Returns once it is on disk. Call it on the writer's thread."""
        self.check_running()
        if self.chain is None:
            self._begin()
        begun = new_incarnation(self._next)
        with self._synchronizing("FULL"), transaction(self._connection):
            add_incarnation(self._connection, begun)
        self._incarnation_id = begun.id
        self._state = self._state._replace(incarnation=begun.id)
        self._record_head()
        if self._unrecorded is None:
            self._sync_record()
        return begun

    def is_undamaged(self, first: int, last: int) -> bool:
        """Return whether no event of a range is damaged. Events that this process has stored need not be read again."""
        return max(1, first) > self._opened_at or self._is_whole(first, min(last, self._opened_at))

    @property
    def sealed_block(self) -> int:
        """The newest sealed block, or -1."""
        return self._sealed

    @property
    def _sealed_until(self) -> int:
        return self._sealed * BLOCK + BLOCK - 1

    def _reserve(self, last: int) -> None:
        if not self._record.is_in_place:
            reason = f"{self._record.path} was removed or replaced, so another process may own the log"
            raise LogWriterFailed(self.path, reason)
        state = self._state._replace(reserved=last + RESERVE)
        try:
            self._record.update(state)
        except OSError as error:
            raise self._head_error(error) from error
        self._sync_record()
        self._state = state

    def _sync_record(self) -> None:
        try:
            self._record.sync()
        except OSError as error:
            raise LogWriterFailed(self.path, f"the head record cannot be synced: {error}") from error

    def _last_sealed(self) -> int:
        sealed = self._connection.exec_driver_sql("SELECT max(block) FROM blocks").scalar()
        return -1 if sealed is None else int(sealed)

    def _seal_full_blocks(self) -> None:
        """Seal full blocks while the queue is empty, or when too many wait. They are derived data and need no sync."""
        while self._stopped is None:
            behind = self.head // BLOCK - 1 - self._sealed
            if behind <= 0 or (behind < SEAL_LAG_BLOCKS_MAX and not self._inbox.empty()):
                return
            if not self._attempt(self._seal_next):
                return
            if self._periodic is not None:
                self._attempt_periodic(self._periodic)

    def _seal_next(self) -> None:
        block = self._sealed + 1
        bounds = (block, block * BLOCK, block * BLOCK + BLOCK - 1)
        digest = (self.chain or self._begin()).of_block(block)
        provable = self.is_undamaged(*bounds[1:])
        with self._synchronizing("NORMAL"), transaction(self._connection):
            for statement in _SEAL:
                self._connection.exec_driver_sql(statement, bounds)
            self._connection.exec_driver_sql(_SEAL_DIGEST, (block, digest))
            store_checksums(self._connection, block, provable)
            drop_passed(self._connection, bounds[2])
        self._sealed = block
        self._identities.sealed_until = self._sealed_until

    def _attempt_periodic(self, periodic: Callable[[], None]) -> None:
        self._periodic_at = self.head
        self._attempt(periodic)

    def _attempt(self, task: Callable[[], object]) -> bool:
        """Run a task that no caller waits for. Returns whether it succeeded; the caller may try it again later."""
        try:
            with log_errors(self.path, writing=True):
                task()
            return True
        except LogWriterFailed as error:
            self._stopped = LogWriterFailed(self.path, error.cause)
        except Exception as error:
            record("LOG_TASK_FAILED", logging.WARNING, error, path=self.path)
        return False


def _refused(error: LogError) -> Refused:
    error.outcome = "refused"
    return Refused(error)


def _unknown(error: LogError) -> Unknown:
    error.outcome = "unknown"
    return Unknown(error)
