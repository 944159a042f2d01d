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
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from sqlalchemy import Connection

from zbus.errors import LogDamaged, LogError, LogStopped
from zbus.observe.records import record
from zbus.ports.log import Appended, Row
from zbus.util.memo import Memo
from zbus_log.file.database import lengthen_wal, log_errors, roll_back, transaction
from zbus_log.file.head_record import RESERVE, Head, HeadRecord
from zbus_log.file.rows import encode_rows
from zbus_log.file.tables import BLOCK

from .commit_notifier import Announcer, Outcome
from .identities import Identities

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

Append = tuple[Sequence[Row], Appended]


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
        self._now_and_then = now_and_then
        self._sealed = self._last_sealed()
        self._key_ids = Memo[str, int](KEYS_KEPT_MAX)
        self._identities = Identities(connection, self._sealed_until)
        self._stopped: LogError | None = None
        self._waiting: deque[Append] = deque()
        self._held: list[Outcome] = []  # of the last commit: nobody was told yet
        self._announcer = Announcer()
        self._due = time.monotonic() + IDLE_S
        self._inbox: SimpleQueue[Append | Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="zbus-log-writer", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Row], done: Appended) -> None:
        """Queue rows for the next commit."""
        self._inbox.put((rows, done))

    def run(self, task: Callable[[], None]) -> None:
        """Queue other work that writes: retention, schemas."""
        self._inbox.put(task)

    @property
    def connection(self) -> Connection:
        """The only one that writes: for work that `run` was given."""
        return self._connection

    def check_running(self) -> None:
        """Raise the error for which nothing is written any more, if there is one."""
        if self._stopped is not None:
            raise self._stopped

    def close(self, timeout_s: float) -> bool:
        """Commit what was submitted and stop; False if that took too long."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs on the writer's thread.

    def _run(self) -> None:
        self._attempt(lambda: lengthen_wal(self.path))
        ended = False
        while not ended or self._waiting:
            ended = not self._gather() or ended
            appends = self._take()
            if appends:
                self._commit(appends)
            self._seal_what_is_full(ended)
        self._tell_held()
        self._announcer.close()

    def _gather(self) -> bool:
        """Take what was submitted; wait only where there is nothing to do. False once the end was asked for."""
        if self._now_and_then is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + IDLE_S
            self._attempt(self._now_and_then)
        try:
            if not self._waiting:
                self._tell_held()
                timeout_s = max(0.0, self._due - time.monotonic()) if self._now_and_then else None
                task = self._inbox.get(timeout=timeout_s)
            else:
                task = self._inbox.get_nowait()
            while task is not None:
                if callable(task):
                    self._attempt(task)
                    return True  # and let the appends that wait have their turn
                self._waiting.append(task)
                task = self._inbox.get_nowait()
            return False
        except Empty:
            return True

    def _take(self) -> list[Append]:
        """What to commit next: of much that waits, half, so that the loop and the log work at the same time.

        While one half is being written, those who wait for the other are told, and publish again.
        """
        share = max(COMMIT_ROWS_MIN, sum(len(rows) for rows, _ in self._waiting) // 2)
        appends: list[Append] = []
        rows = size = 0
        while self._waiting and rows < min(share, COMMIT_ROWS_MAX) and size < COMMIT_BYTES_MAX:
            appends.append(self._waiting.popleft())
            rows += len(appends[-1][0])
            size += sum([len(row[4]) for row in appends[-1][0]])
        return appends

    def _commit(self, appends: list[Append]) -> None:
        """Store all appends in one transaction; each learns its offsets, or the error."""
        batch = appends[0][0] if len(appends) == 1 else [row for rows, _ in appends for row in rows]
        error: LogError
        try:
            if self._stopped is not None:
                raise self._stopped
            offsets = self._store(batch)
        except LogError as failed:
            error = failed
        except struct.error as failed:  # raised before anything was written
            error = LogError(f"{self.path}: an event cannot be encoded ({failed}); not stored")
        except Exception as failed:  # a fault of ours: nobody may wait for ever, and nothing more is written
            record("LOG_STOPPED", logging.CRITICAL, failed, path=self.path)
            error = self._stopped = LogStopped(self.path, f"unexpected {failed!r}")
        else:
            outcomes: list[Outcome] = []
            at = 0
            for rows, done in appends:
                outcomes.append((done, offsets[at : at + len(rows)]))
                at += len(rows)
            self._settle(outcomes)
            return
        self._settle([(done, error) for _, done in appends])

    def _settle(self, outcomes: list[Outcome]) -> None:
        """Tell the outcome of a commit: at once, or, if there is more to write, while that is being written."""
        self._tell_held()
        if self._waiting or not self._inbox.empty():
            self._held = outcomes
        else:
            self._announcer.now(outcomes)

    def _tell_held(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._announcer.soon(held)

    def _store(self, batch: Sequence[Row]) -> Sequence[int]:
        first = self._next
        with log_errors(self.path, writing=True):
            fresh, offsets = self._identities.fresh(batch, first)
        if fresh:
            last = first + len(fresh) - 1
            try:
                with log_errors(self.path, writing=True):
                    try:
                        self._reserve(last)
                    except OSError as error:
                        raise LogStopped(self.path, f"the head record cannot be synced: {error}") from error
                    self._insert(fresh, first)
            except LogError as error:
                self._after_failure(error, last)
            self.head = last
            self._next = last + 1
            self._touch_record()
        return offsets

    def _insert(self, rows: Sequence[Row], first: int) -> None:
        key_ids, used = self._key_ids, {row[3] for row in rows}
        known = {name: key_ids[name] for name in used if name in key_ids}
        if len(known) == len(used):
            statement, parameters = encode_rows(rows, first, known)
            self._tell_held()
            self._connection.exec_driver_sql(statement, parameters)
            return
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
        if isinstance(error, LogStopped | LogDamaged):
            self._stopped = error if isinstance(error, LogStopped) else LogStopped(self.path, str(error))
            raise self._stopped from error
        with log_errors(self.path, writing=True):
            roll_back(self._connection)
            self._identities.forget()
            stored = self._connection.exec_driver_sql("SELECT max(offset) FROM events").scalar_one() or 0
        if stored != last:
            raise error

    # The head record, and sealing.

    @property
    def _sealed_until(self) -> int:
        return self._sealed * BLOCK + BLOCK - 1

    def _reserve(self, last: int) -> None:
        if last > self._state.reserved:
            self._state = self._state._replace(reserved=last + RESERVE)
            self._record.update(self._state)
            self._record.sync()

    def _touch_record(self) -> None:
        self._state = Head(self._state.epoch, self.head, self._state.reserved)
        self._record.update(self._state)

    def _last_sealed(self) -> int:
        sealed = self._connection.exec_driver_sql("SELECT max(block) FROM blocks").scalar()
        return -1 if sealed is None else int(sealed)

    def _seal_what_is_full(self, ended: bool) -> None:
        """Seal when there is nothing else to do, or when it cannot wait. Derived data: no sync of its own."""
        while not ended and self._stopped is None:
            behind = self.head // BLOCK - 1 - self._sealed
            if behind <= 0 or (behind < SEAL_LAG_BLOCKS_MAX and (self._waiting or not self._inbox.empty())):
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
        except LogStopped as error:
            self._stopped = error
        except Exception as error:
            record("LOG_TASK_FAILED", logging.WARNING, error, path=self.path)
        return False
