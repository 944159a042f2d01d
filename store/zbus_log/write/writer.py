"""The one writer of a log: a thread that commits whatever has gathered, and seals full blocks.

Group commit comes by itself: while one batch is being synced to disk, the next one gathers. Each
batch is one statement, hence one transaction and one sync. A batch that brings a new key begins a
transaction by name, so that the key and its first event are stored together.

The loop and the writer share one interpreter, which the writer needs before and after each statement
but not during it. So of much that waits it takes half, gets that going, and only then lets those be told
whose commit was the one before: they publish again while the statement runs.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from sqlalchemy import Connection

from zbus.errors import LogDamaged, LogError, LogWriterFailed
from zbus.observe.records import record
from zbus.ports.log import Appended, AppendResult, Committed, Refused, Row, Stored, Unknown
from zbus.util.memo import Memo
from zbus_log.file.database import SQLITE_ERRORS, as_log_error, lengthen_wal, log_errors, roll_back, transaction
from zbus_log.file.head_record import RESERVE, Head, HeadRecord
from zbus_log.file.rows import encode_rows
from zbus_log.file.tables import BLOCK

from .commit_notifier import CommitNotifier, Notice
from .identities import StoredIdentities

COMMIT_ROWS_MIN = 128
COMMIT_ROWS_MAX = 4096
COMMIT_BYTES_MAX = 32 * 1024 * 1024
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
    "INSERT INTO blocks SELECT ?1, count(*), ifnull(sum(length(payload)), 0), min(published_at), max(published_at) "
    "FROM events WHERE offset BETWEEN ?2 AND ?3",
)

Append = tuple[Sequence[Row], Appended, Any]
Task = Callable[[], None]


class _End:
    """The end of what is submitted."""


_END = _End()


class _OutcomeUnknown(Exception):
    """A commit failed in a way that leaves open whether it happened."""

    def __init__(self, error: LogError) -> None:
        super().__init__(str(error))
        self.error = error


class Writer:
    """Owns the only connection that writes. `submit` never waits; each `done` is called once."""

    def __init__(
        self,
        path: str,
        connection: Connection,
        head_record: HeadRecord,
        synchronous: str,
        start_after: int,
        now_and_then: Callable[[], None] | None,
    ) -> None:
        self.path, self._connection, self._record = path, connection, head_record
        self._synchronous = synchronous
        state = head_record.current
        assert state is not None
        self.head, self._state = state.head, state
        self._next = start_after + 1
        self._told = start_after  # up to here the tail has had every event
        self._now_and_then = now_and_then
        self._sealed = self._last_sealed()
        self._key_ids = Memo[str, int](KEYS_KEPT_MAX)
        self._identities = StoredIdentities(connection, self._sealed_until)
        self._stopped: LogError | None = None
        self._held: list[Notice] = []  # of the last commit: nobody was notified yet
        self._announcer = CommitNotifier()
        self._due = time.monotonic() + IDLE_S
        self._ended = False
        self._inbox: SimpleQueue[Append | Task | _End] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="zbus-log-writer", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Row], done: Appended, about: Any = None) -> None:
        """Queue rows for the next commit."""
        if self._ended:
            done(AppendResult(about, self._refused()))
        else:
            self._inbox.put((rows, done, about))

    def run(self, task: Callable[[], None]) -> None:
        """Queue other work that writes: retention, schemas."""
        self._inbox.put(task)

    def tail(self, committed: Callable[[Committed], None]) -> int:
        """Call `committed` with what is stored from now on; return the offset before that."""
        self._announcer.tail = committed
        return self.head

    @property
    def connection(self) -> Connection:
        """The only one that writes: for work that `run` was given."""
        return self._connection

    def _refused(self) -> Refused:
        return Refused(LogError(f"{self.path} is closed; not stored"))

    def check_running(self) -> None:
        """Raise the error for which nothing is written any more, if there is one."""
        if self._stopped is not None:
            raise self._stopped

    def close(self, timeout_s: float) -> bool:
        """Commit what was submitted and stop; False if that took too long."""
        self._ended = True
        self._inbox.put(_END)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs on the writer's thread.

    def _run(self) -> None:
        self._attempt(lambda: lengthen_wal(self.path))
        task: Task | _End | None = None
        while task is not _END:
            appends, task = self._gather()
            if appends:
                try:
                    self._commit(appends)
                except Exception as error:  # a defect of ours: nobody may wait forever, and nothing more is written
                    record("LOG_WRITER_FAILED", logging.CRITICAL, error, path=self.path)
                    self._stopped = LogWriterFailed(self.path, f"unexpected {error!r}")
                    self._announcer.now([(done, about, Unknown(self._stopped), None) for _, done, about in appends])
            if callable(task):
                self._attempt(task)
            if self.head // BLOCK - 1 > self._sealed and task is not _END:
                self._seal_what_is_full()
        self._release_held()
        self._announcer.close()
        while not self._inbox.empty():  # submitted while it ended
            item = self._inbox.get_nowait()
            if isinstance(item, tuple):
                item[1](AppendResult(item[2], self._refused()))

    def _gather(self) -> tuple[list[Append], Task | _End | None]:
        """Take what to commit next, and then the task (or the end) that follows it. Waits if there is nothing to do.

        If much waits, take about half, so that the loop and the log work at the same time: while one half is being
        written, the publishers of the other are notified and publish again.
        """
        if self._now_and_then is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + IDLE_S
            self._attempt(self._now_and_then)
        inbox, appends = self._inbox, list[Append]()
        if self._held and inbox.empty():
            self._release_held()
        rows = size = 0
        half = inbox.qsize() // 2
        try:
            item = inbox.get(timeout=max(0.0, self._due - time.monotonic()) if self._now_and_then else None)
            while isinstance(item, tuple):
                appends.append(item)
                rows += len(item[0])
                size += sum([len(row.payload) for row in item[0]])
                enough = rows >= COMMIT_ROWS_MIN and len(appends) >= half
                if enough or rows >= COMMIT_ROWS_MAX or size >= COMMIT_BYTES_MAX:
                    return appends, None
                item = inbox.get_nowait()
            return appends, item
        except Empty:
            return appends, None

    def _commit(self, appends: list[Append]) -> None:
        """Store all appends in one transaction; each learns its outcome, and the tail what is new."""
        batch = appends[0][0] if len(appends) == 1 else [row for rows, _, _ in appends for row in rows]
        failed: Refused | Unknown
        notices: list[Notice] = []
        try:
            if self._stopped is not None:
                raise self._stopped
            fresh, offsets = self._store(batch)
        except _OutcomeUnknown as unknown:
            failed = Unknown(unknown.error)
        except LogError as error:
            failed = Refused(error)
        except struct.error as error:  # raised before anything was written
            failed = Refused(LogError(f"{self.path}: an event cannot be encoded ({error}); not stored"))
        except Exception as error:  # a defect of ours: nobody may wait forever, and nothing more is written
            record("LOG_WRITER_FAILED", logging.CRITICAL, error, path=self.path)
            self._stopped = LogWriterFailed(self.path, f"unexpected {error!r}")
            failed = Unknown(self._stopped)
        else:
            at = 0
            for rows, done, about in appends:
                part = offsets[at : at + len(rows)]
                at += len(rows)
                if fresh is batch:
                    notices.append((done, about, Stored(part), Committed(rows, part)))
                else:
                    notices.append((done, about, *self._new_of(rows, part)))
        if not notices:
            notices = [(done, about, failed, None) for _, done, about in appends]
        if self._held:
            self._release_held()
        if self._inbox.empty():
            self._announcer.now(notices)
        else:  # there is more to write: notify while that is being written
            self._held = notices

    def _new_of(self, rows: Sequence[Row], offsets: Sequence[int]) -> tuple[Stored, Committed | None]:
        """The outcome of an append some of whose rows were stored before, and the others, which the tail needs."""
        fresh: dict[int, Row] = {}
        repeated: set[int] = set()
        for index, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
            if offset > self._told:
                fresh[offset] = row
                self._told = offset
            else:
                repeated.add(index)
        return Stored(offsets, repeated), Committed(list(fresh.values()), list(fresh)) if fresh else None

    def _release_held(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._announcer.soon(held)

    def _store(self, batch: Sequence[Row]) -> tuple[Sequence[Row], Sequence[int]]:
        """Store what is new of a batch; return that, and the offset of every row."""
        first = self._next
        try:
            fresh, offsets = self._identities.fresh(batch, first)
        except SQLITE_ERRORS as error:
            raise as_log_error(self.path, error, writing=True) from error
        if not fresh:
            return fresh, offsets
        last = first + len(fresh) - 1
        try:
            if last > self._state.reserved:
                self._reserve(last)
            self._insert(fresh, first)
        except SQLITE_ERRORS as error:
            self._after_failure(as_log_error(self.path, error, writing=True), last)
        except LogError as error:
            self._after_failure(error, last)
        if fresh is batch:
            self._told = last
        self.head = last
        self._next = last + 1
        self._state = Head(self._state.epoch, last, self._state.reserved)
        self._record.update(self._state)
        return fresh, offsets

    def _insert(self, rows: Sequence[Row], first: int) -> None:
        key_ids = self._key_ids
        try:
            statement, parameters = encode_rows(rows, first, key_ids)
        except KeyError:
            pass  # some keys are new, or were forgotten
        else:
            if self._held:
                self._release_held()
            self._connection.exec_driver_sql(statement, parameters)
            return
        used = {row.key for row in rows}
        known = {name: key_ids[name] for name in used if name in key_ids}
        names = json.dumps(sorted(used - known.keys()))
        with transaction(self._connection):
            self._connection.exec_driver_sql(
                "INSERT INTO keys (key) SELECT value FROM json_each(?1) WHERE value NOT IN (SELECT key FROM keys)",
                (names,),
            )
            found = self._connection.exec_driver_sql(
                "SELECT key, id FROM keys WHERE key IN (SELECT value FROM json_each(?1))", (names,)
            )
            added: dict[str, int] = dict(found.all())
            self._connection.exec_driver_sql(*encode_rows(rows, first, known | added))
        key_ids.update(added)

    def _after_failure(self, error: LogError, last: int) -> None:
        """A commit that failed may have happened: look, and say what is true."""
        if isinstance(error, LogWriterFailed | LogDamaged):
            self._stopped = error if isinstance(error, LogWriterFailed) else LogWriterFailed(self.path, str(error))
            raise _OutcomeUnknown(self._stopped) from error
        try:
            roll_back(self._connection)
            self._identities.forget()
            stored = self._connection.exec_driver_sql("SELECT max(offset) FROM events").scalar_one() or 0
        except SQLITE_ERRORS as failed:  # it cannot be looked up either
            raise _OutcomeUnknown(as_log_error(self.path, failed, writing=True)) from failed
        if stored != last:
            raise error

    # The head record, and sealing.

    @property
    def _sealed_until(self) -> int:
        return self._sealed * BLOCK + BLOCK - 1

    def _reserve(self, last: int) -> None:
        self._state = self._state._replace(reserved=last + RESERVE)
        try:
            self._record.update(self._state)
            self._record.sync()
        except OSError as error:
            raise LogWriterFailed(self.path, f"the head record cannot be synced: {error}") from error

    def _last_sealed(self) -> int:
        sealed = self._connection.exec_driver_sql("SELECT max(block) FROM blocks").scalar()
        return -1 if sealed is None else int(sealed)

    def _seal_what_is_full(self) -> None:
        """Seal when there is nothing else to do, or when it cannot wait. Derived data: no sync of its own."""
        while self._stopped is None:
            behind = self.head // BLOCK - 1 - self._sealed
            if behind <= 0 or (behind < SEAL_LAG_BLOCKS_MAX and not self._inbox.empty()):
                return
            if not self._attempt(self._seal_next):
                return
            if self._now_and_then is not None:
                self._attempt(self._now_and_then)

    def _seal_next(self) -> None:
        block = self._sealed + 1
        bounds = (block, block * BLOCK, block * BLOCK + BLOCK - 1)
        self._connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
        try:
            with transaction(self._connection):
                for statement in _SEAL:
                    self._connection.exec_driver_sql(statement, bounds)
        finally:
            self._connection.exec_driver_sql(f"PRAGMA synchronous={self._synchronous}")
        self._sealed = block
        self._identities.sealed_until = self._sealed_until

    def _attempt(self, task: Callable[[], None]) -> bool:
        """Work that nobody awaits. It is tried again after the next commit, unless syncing failed."""
        try:
            with log_errors(self.path, writing=True):
                task()
            return True
        except LogWriterFailed as error:
            self._stopped = error
        except Exception as error:
            record("LOG_TASK_FAILED", logging.WARNING, error, path=self.path)
        return False
