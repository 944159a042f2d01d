"""Cursors: the acknowledged position of each durable subscription.

They are in a separate SQLite file beside the log, because a durable subscriber may run in another
process than the log's owner, and the log's file has only one writer. A lease is a token, with which
positions are stored, and a lock, which ends with its process.

SQLite does not notice that its file was removed, and would acknowledge positions into a file that
no process can open again. So each write first compares the file with the one beside the log, and if it
is another one, stores the leases of this process again, with the positions that are in memory.

A position is stored with the incarnation that stored its event, because after a restore the log can
have another event at the same offset, or none. Such a position is refused, and does not delay
retention.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import INTEGER, TEXT, Column, Connection, MetaData, Row, Table, bindparam, delete, select, update
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.schema import CreateTable

from zbus.errors import CursorError, LogDamaged, LogError, ZbusError, renewed
from zbus.observe.records import record_reason
from zbus.ports.lineage import Lineage
from zbus.ports.log import Cursor, Lease
from zbus.util.run_id import inherit
from zbus_log.file.database import (
    SharedWrites,
    columns_of,
    log_errors,
    make_engine,
    read_table,
    reading_errors,
    transaction,
    use_wal,
)
from zbus_log.file.incarnations import KEPT_MAX
from zbus_log.file.name_locks import NameLock, NameLocks

from .cursor_expiry import expire, forget_use, get_expired_at, note_use, prepare_uses, uses
from .cursor_notes import CursorNote, decode_note
from .positions import SqlitePositions

if TYPE_CHECKING:
    from zbus.ports.log import Cursors

NAME_MAX = 200
RETRY_S = 0.25
EMPTY_TIMES, EMPTY_PAUSE_S = 5, 0.02
NOTED_TIMES = 3
USE_NOTED = 4  # how often the use of a cursor is stored during the time after which it would expire

_cursors = Table(
    "cursors",
    MetaData(),
    Column("name", TEXT, primary_key=True),
    Column("offset", INTEGER, nullable=False),
    Column("keys", TEXT, nullable=False),
    Column("updated_at", INTEGER, nullable=False),
    Column("owner_pid", INTEGER),  # for messages: whether the lease is held, its lock says
    Column("token", TEXT),
    Column("incarnation", INTEGER),  # NULL if version 0.1 stored the position
    Column("checksum", INTEGER),  # of the name, the position, its incarnation and the keys; NULL as above
    sqlite_strict=True,
)
_ADDED = {
    "token": "TEXT",
    "incarnation": "INTEGER",
    "checksum": "INTEGER",
}  # columns that the first versions did not have
_ADVANCE = (
    update(_cursors)
    .where(
        _cursors.c.name == bindparam("which"),
        _cursors.c.token == bindparam("lease"),
        _cursors.c.offset < bindparam("position"),
    )
    .values(
        offset=bindparam("position"),
        updated_at=bindparam("now"),
        incarnation=bindparam("stored_by"),
        checksum=bindparam("of_all"),
    )
)

Done = Callable[[ZbusError | None], None]


class History(Protocol):
    """The log that the positions are about."""

    @property
    def lineage(self) -> Lineage:
        """Its incarnations."""

    def head(self) -> int:
        """Its last committed offset."""

    def is_lost(self, offset: int) -> bool:
        """Whether it accepted the loss of an offset."""


class CursorFileDamaged(LogDamaged):
    """Raised when the file of the cursors is damaged. The log is not affected."""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.reason}. Nothing was changed, and the log is not affected. Restore the file, or "
            "remove it: then every durable subscription begins like a new one"
        )


@dataclass
class _Held:
    """A lease that this process holds."""

    lock: NameLock
    keys: str
    offset: int  # the last position that was stored


class SqliteCursors:
    """The cursors of one log. Every method except `advance` may block.

    Without `history`, they cannot be claimed or moved.
    """

    def __init__(self, log_path: str, history: History | None = None) -> None:
        self.path = f"{log_path}-cursors"
        self._log_path, self._of = log_path, history
        self._reported: set[str] = set()  # names of cursors that do not delay retention
        self._engine = make_engine(self.path)
        self._writes = SharedWrites()
        self.positions = SqlitePositions(self.path, self._engine, self._writes)
        self._locks = NameLocks(f"{log_path}-leases", beside=self.path)
        self._held: dict[tuple[str, str], _Held] = {}  # by name and token
        self._is_checked = False  # whether SQLite has checked the file
        self._are_noted = False  # whether the rows were compared with the notes
        self._pending: dict[tuple[str, str], int] = {}  # positions by name and token
        self._waiting: list[tuple[tuple[str, str], Done]] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._flushing = threading.RLock()
        self._connection: Connection | None = None  # kept open for writing; used only while holding `_flushing`
        self._file: os.stat_result | None = None  # what that connection has open

    def claim(self, name: str, keys: Sequence[str], start: int) -> Lease:
        """Take the lease of a durable name.

        Raises `CursorError` if a running process holds it, or if its position is not in this log.
        """
        check_name(name)
        token = secrets.token_hex(16)
        owner: dict[str, Any] = {"owner_pid": os.getpid(), "keys": json.dumps(list(keys)), "token": token}
        lock = self._take(name, "holds its lease; a durable subscription has one subscriber at a time")
        try:
            with self._writing() as connection:
                row = connection.execute(select(_cursors).where(_cursors.c.name == name)).one_or_none()
                if row is not None:
                    self._check(row)
                    self._check_not_expired(connection, name, row.offset)
                self._check_note(decode_note(lock.noted()), None if row is None else row.offset)
                if row is not None and (problem := self.problem(_cursor(row))) is not None:
                    raise CursorError(name, f"{problem}. {self._advice(name)}")
                note_use(connection, name, time.time_ns())
                offset, stored_by = start, self._history.lineage.of(start) or 0
                if row is not None:
                    offset, stored_by = row.offset, row.incarnation
                owner["checksum"] = _checksum(name, offset, stored_by, owner["keys"])
                connection.execute(
                    upsert(_cursors)
                    .values(name=name, offset=offset, updated_at=time.time_ns(), incarnation=stored_by, **owner)
                    .on_conflict_do_update(index_elements=["name"], set_=owner)
                )
            lock.note(CursorNote(name, offset, stored_by or 0).encode())
        except BaseException:
            lock.close()
            raise
        lease = Lease(token, start, ()) if row is None else Lease(token, int(row.offset), tuple(json.loads(row.keys)))
        self._held[name, token] = _Held(lock, json.dumps(list(keys)), lease.offset)
        self._start()
        return lease

    def advance(self, name: str, token: str, offset: int, done: Done | None = None) -> None:
        """Queue a position. Does not block. Cancelling the wait for `done` does not withdraw the position."""
        lease = name, token
        with self._wake:
            if self._ended:
                if done is not None:
                    done(LogError(f"{self.path} is closed; the position of {name!r} was not stored"))
                return
            self._pending[lease] = max(offset, self._pending.get(lease, 0))
            if done is not None:
                self._waiting.append((lease, done))
            self._start()
            self._wake.notify()

    def release(self, name: str, token: str) -> None:
        """Store the pending positions and release the lease. Raises `LogError` if the positions are not stored.

        The name is free in any case: without its lock, the token in the file is no lease.
        """
        try:
            if (error := self._flush()) is not None:
                raise error
            if (name, token) in self._held:
                with self._writing() as connection:
                    connection.execute(
                        update(_cursors)
                        .where(_cursors.c.name == name, _cursors.c.token == token)
                        .values(owner_pid=None, token=None)
                    )
                    note_use(connection, name, time.time_ns())
        finally:
            if (held := self._held.pop((name, token), None)) is not None:
                held.lock.close()

    def list(self) -> Sequence[Cursor]:
        """Return every cursor, by name."""
        rows, known = self._checked_rows(), self._uses()
        return [
            _cursor(
                row,
                _holder(row) if row.token is not None and self._locks.is_held(row.name) else None,
                known[row.name][1] if row.name in known else None,
            )
            for row in rows
        ]

    def lowest(self) -> Cursor | None:
        """Return the cursor that is furthest behind, where retention stops. Its owner is not looked up.

        A cursor that is beyond the offsets that its incarnation shares with this log is taken to be at their end. One
        that shares none does not count, and is reported once. Neither does one that expired.
        """
        rows = self._checked_rows()
        expired = {name for name, (_, expired_at) in self._uses().items() if expired_at is not None} if rows else ()
        held: list[Cursor] = []
        for cursor in [_cursor(row) for row in rows if row.name not in expired]:
            if (problem := self.problem(cursor)) is None:
                held.append(cursor)
                continue
            until = self._history.lineage.until(cursor.incarnation)
            if until is not None:
                held.append(cursor._replace(offset=min(cursor.offset, until, self._history.head())))
            if cursor.name not in self._reported:
                self._reported.add(cursor.name)
                reason = f"{problem}. {self._advice(cursor.name)}"
                record_reason(
                    "LOG_CURSOR_UNUSABLE",
                    logging.WARNING,
                    code="cursor_unusable",
                    reason=reason,
                    path=self.path,
                    durable=cursor.name,
                )
        return min(held, key=lambda cursor: cursor.offset, default=None)

    def problem(self, cursor: Cursor) -> str | None:
        """Return why the position of a cursor cannot be used with this log, or None.

        A position that the log accepted as lost can be used: the events after it are those that the log has.
        """
        found = _problem(cursor, self._history.lineage, self._history.head())
        return None if found is not None and self._history.is_lost(cursor.offset) else found

    def _checked_rows(self) -> Sequence[Row[Any]]:
        """Return all rows. Raises `CursorError` if one is damaged or missing.

        Notes are read first, because positions are stored before they are noted. A position that another process
        deletes or moves in between looks like damage, but only once.
        """
        for attempt in range(1, NOTED_TIMES + 1):
            notes = [] if self._of is None or self._are_noted else list(map(decode_note, self._locks.notes()))
            rows = self._rows()
            offsets = {row.name: row.offset for row in rows}
            try:
                for row in rows:
                    self._check(row)
                for note in notes if rows or os.path.exists(self.path) else ():  # noqa: PTH110
                    if note is not None:
                        self._check_note(note, offsets.get(note.name))
            except CursorError:
                if attempt == NOTED_TIMES:
                    raise
                time.sleep(EMPTY_PAUSE_S)
            else:
                self._are_noted = True
                break
        return rows

    def _check_note(self, note: CursorNote | None, offset: int | None) -> None:
        problem = None if note is None else note.problem(offset, self._history.lineage)
        if note is not None and problem is not None:
            reason = f"{self.path} is damaged, or was replaced by an older one: {problem}"
            raise CursorError(note.name, f"{reason}. {self._advice(note.name)}")

    def _check_not_expired(self, connection: Connection, name: str, offset: int) -> None:
        expired_at_ns = get_expired_at(connection, name)
        if expired_at_ns is not None:
            when = datetime.fromtimestamp(expired_at_ns // 1_000_000_000, UTC).isoformat(timespec="seconds")
            reason = (
                f"it expired at {when}, because it was not used for cursor_ttl_s; retention may have removed events "
                f"after its position, offset {offset}"
            )
            raise CursorError(name, f"{reason}. {self._advice(name)}")

    def _check(self, row: Row[Any]) -> None:
        """Raise `CursorError` if a row does not match its checksum."""
        if row.checksum is not None and row.checksum != _checksum(row.name, row.offset, row.incarnation, row.keys):
            reason = f"its row in {self.path} is damaged, and its position is not known"
            raise CursorError(str(row.name), f"{reason}. {self._advice(str(row.name))}")

    @property
    def _history(self) -> History:
        assert self._of is not None
        return self._of

    def _advice(self, name: str) -> str:
        command = f"zbus log cursors {shlex.quote(self._log_path)}"
        return (
            f"Choose where it continues: {command} --reset {shlex.quote(name)} --to OFFSET (or beginning, or end); or "
            f"delete it, so that it begins like a new one: {command} --delete {shlex.quote(name)}"
        )

    def _rows(self) -> Sequence[Row[Any]]:
        if self._held:
            with self._flushing, reading_errors(self.path):
                self._current()  # a file that was removed has the positions of this process again
        if not os.path.exists(self.path):  # noqa: PTH110 - the log never had a cursor
            return []
        self._check_length()
        with reading_errors(self.path), self._engine.connect() as connection:
            self._check_file(connection)
            return read_table(connection, _cursors)

    def expire_unused(self, ttl_s: float, now_ns: int) -> None:
        """Let cursors expire that no subscriber has used for `ttl_s` seconds."""
        ttl_ns, known = int(ttl_s * 1e9), self._uses()
        for row in self._rows():
            used_at, expired_at = known.get(row.name, (0, None))
            unused_ns = now_ns - max(used_at, row.updated_at)
            if expired_at is not None or unused_ns < ttl_ns // USE_NOTED:
                continue
            lock = None if self._locks.is_held(row.name) else self._locks.take(row.name)
            if lock is None:  # a subscriber has it, and its events may be rare
                with self._writing() as connection:
                    note_use(connection, row.name, now_ns)
                continue
            with closing(lock):
                if unused_ns >= ttl_ns:
                    with self._writing() as connection:
                        expire(connection, row.name, now_ns)
                    self._report_expired(row.name, row.offset, unused_ns)

    def _report_expired(self, name: str, offset: int, unused_ns: int) -> None:
        unused_s = unused_ns // 1_000_000_000
        reason = f"the durable subscription was not used for {unused_s} s; retention no longer waits for it"
        fields = {"path": self.path, "durable": name, "offset": offset, "unused_s": unused_s}
        record_reason("LOG_CURSOR_EXPIRED", logging.WARNING, code="cursor_expired", reason=reason, **fields)

    def _uses(self) -> dict[str, tuple[int, int | None]]:
        if not os.path.exists(self.path):  # noqa: PTH110 - the log never had a cursor
            return {}
        with log_errors(self.path), self._engine.connect() as connection:
            return uses(connection)

    def reset(self, name: str, offset: int) -> None:
        """Move a cursor in either direction. Raises `CursorError` if a subscriber uses it."""
        self._change(name, offset)

    def delete(self, name: str) -> None:
        """Delete a cursor. Raises `CursorError` if a subscriber uses it."""
        self._change(name, None)

    def close(self, timeout_s: float) -> None:
        """Store the pending positions and stop, within `timeout_s` seconds. Later positions are not stored."""
        deadline = time.monotonic() + timeout_s
        self._writes.end(timeout_s)
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._flushing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._disconnect()
            self._flushing.release()
        while self._held:
            self._held.popitem()[1].lock.close()
        self._engine.dispose()

    def forked(self) -> None:
        """Give up all leases in a forked process, without releasing those of its parent."""
        self._wake, self._flushing = threading.Condition(), threading.RLock()  # other threads may hold the old ones
        self._ended, self._thread, self._connection = True, None, None
        while self._held:
            self._held.popitem()[1].lock.abandon()
        self._pending.clear()
        self._waiting.clear()

    def _change(self, name: str, offset: int | None) -> None:
        unknown = CursorError(name, "there is no such cursor")
        noted = {note.name for note in map(decode_note, self._locks.notes()) if note is not None}
        if name not in noted and not any(row.name == name for row in self._rows()):  # before a lock creates a file
            raise unknown
        with closing(self._take(name, "uses it; stop that process first")) as lock:
            is_noted = decode_note(lock.noted()) is not None  # then the row may be missing because of damage
            with log_errors(self.path), self._engine.connect() as connection, self._writes.transaction(connection):
                row = connection.execute(select(_cursors).where(_cursors.c.name == name)).one_or_none()
                if row is None and not is_noted:
                    raise unknown
                if offset is None:
                    forget_use(connection, name)
                    connection.execute(delete(_cursors).where(_cursors.c.name == name))
                else:
                    stored_by = self._history.lineage.of(offset) or 0
                    lock.note(CursorNote(name, offset, stored_by).encode())  # first, because it may move back
                    note_use(connection, name, time.time_ns())
                    keys = row.keys if row is not None and _is_list(row.keys) else "[]"
                    values = {"offset": offset, "updated_at": time.time_ns(), "incarnation": stored_by, "keys": keys}
                    values["checksum"] = _checksum(name, offset, stored_by, keys)
                    insert = upsert(_cursors).values(name=name, **values)
                    connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_=values))
            if offset is None:
                self._locks.remove(name)

    def _take(self, name: str, otherwise: str) -> NameLock:
        """Lock a name. Call it outside of transactions: it may wait, and a transaction blocks other processes."""
        lock = self._locks.take(name)
        if lock is None:
            row = next((row for row in self._rows() if row.name == name), None)
            here = row is not None and row.owner_pid == os.getpid()
            where = "this process has it open already: " if here else ""
            raise CursorError(name, f"{where}{_holder(row)} {otherwise}")
        return lock

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=inherit(self._run), name="zbus-log-cursors", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        ended = failed = False
        while not ended:
            with self._wake:
                if failed and not self._ended:
                    self._wake.wait(RETRY_S)
                while not self._pending and not self._ended:
                    self._wake.wait()
                ended = self._ended
            failed = self._flush() is not None

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """Run one write transaction."""
        with self._flushing, reading_errors(self.path):
            connection = self._current()
            with self._writes.transaction(connection):
                yield connection

    def _current(self) -> Connection:
        """Return a connection to the file that is beside the log now. Call it while holding `_flushing`."""
        if self._connection is not None and not self._is_in_place():
            self._disconnect()
            self._is_checked = False
        if self._connection is None:
            self._check_length()
            if self._stat() is None:  # a new file: notes are of one that was removed
                self._locks.clear_notes()
            connection = self._engine.connect()
            try:
                self._check_file(connection)
                _prepare(connection)
                self._file = self._stat()
                if self._held:
                    self._store_again(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _check_file(self, connection: Connection) -> None:
        """Raise `LogDamaged` if SQLite finds the file damaged: a row that is gone would look like a new name.

        The file is small, and it is checked once.
        """
        if self._is_checked:
            return
        found = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
        if found != ["ok"]:
            raise CursorFileDamaged(self.path, f"SQLite says: {found[0]}")
        self._is_checked = True

    def _check_length(self) -> None:
        """Raise `LogDamaged` if the file lost its content. A file that another process creates is empty briefly."""
        for _ in range(EMPTY_TIMES):
            now = None if self._is_checked else self._stat()
            if now is None or now.st_size or not self._locks.any():
                return
            time.sleep(EMPTY_PAUSE_S)
        raise CursorFileDamaged(self.path, "it is empty, but durable subscriptions were used")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _is_in_place(self) -> bool:
        now = self._stat()
        return now is not None and self._file is not None and os.path.samestat(now, self._file)

    def _stat(self) -> os.stat_result | None:
        try:
            return os.stat(self.path)  # noqa: PTH116
        except OSError:
            return None

    def _store_again(self, connection: Connection) -> None:
        """Store the leases of this process in a file that does not have them."""
        held, lineage = list(self._held.items()), self._history.lineage
        with self._writes.transaction(connection):
            for (name, token), lease in held:
                stored_by = lineage.of(lease.offset) or 0
                values = {"offset": lease.offset, "keys": lease.keys, "owner_pid": os.getpid(), "token": token}
                values["incarnation"] = stored_by
                values["checksum"] = _checksum(name, lease.offset, stored_by, lease.keys)
                insert = upsert(_cursors).values(name=name, updated_at=time.time_ns(), **values)
                if lease.lock.is_in_place:
                    connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_=values))
                else:  # the locks were removed too, and another subscriber may have claimed the name
                    connection.execute(insert.on_conflict_do_nothing(index_elements=["name"]))
        reason = (
            f"{self.path} was removed or replaced, and its positions are lost. Those of this process are stored again; "
            "any other durable name starts like a new one"
        )
        names = [name for (name, _), _ in held]
        record_reason(
            "LOG_CURSORS_LOST", logging.ERROR, code="cursors_removed", reason=reason, path=self.path, durables=names
        )

    def _flush(self) -> LogError | None:
        with self._flushing:  # a second caller waits until the positions that the first one took are stored
            with self._wake:
                pending, self._pending = self._pending, {}
                waiting, self._waiting = self._waiting, []
            error: LogError | None = None
            held: set[tuple[str, str]] = set()
            if pending:
                try:
                    held = self._store(pending)
                except LogError as failed:
                    error = failed
                    with self._wake:  # try again with the next positions
                        for lease, offset in pending.items():
                            self._pending[lease] = max(offset, self._pending.get(lease, 0))
            if self._ended:  # `close` may have given up already
                self._disconnect()
        for lease, done in waiting:
            lost = CursorError(
                lease[0],
                "the subscription was closed, or another subscriber has its lease; the position was not stored",
            )
            done(renewed(error) if error is not None else None if lease in held else lost)
        return error

    def _store(self, pending: Mapping[tuple[str, str], int]) -> set[tuple[str, str]]:
        """Store positions. Returns the leases that are still held."""
        now, lineage = time.time_ns(), self._history.lineage
        rows = []
        for (name, token), offset in pending.items():
            if (lease := self._held.get((name, token))) is not None:
                stored_by = lineage.of(offset) or 0
                of_all = _checksum(name, offset, stored_by, lease.keys)
                values = {"position": offset, "now": now, "stored_by": stored_by, "of_all": of_all}
                rows.append({"which": name, "lease": token, **values})
        with self._writing() as connection:
            if rows:
                connection.execute(_ADVANCE, rows)
            names = {name for name, _ in pending}
            found = connection.execute(select(_cursors.c.name, _cursors.c.token).where(_cursors.c.name.in_(names)))
            held = {(row.name, row.token) for row in found}
        for each, offset in pending.items():
            if each in held and each in self._held:
                lease = self._held[each]
                lease.offset = max(offset, lease.offset)
                lease.lock.note(CursorNote(each[0], lease.offset, lineage.of(lease.offset) or 0).encode())
        for name, _ in pending.keys() - held:
            reason = "the subscription was closed, or another subscriber claimed the name"
            record_reason("LEASE_LOST", logging.WARNING, code="lease_lost", reason=reason, durable=name)
        return held & pending.keys()


def _checksum(name: str, offset: int, incarnation: int | None, keys: str) -> int:
    return zlib.crc32(json.dumps([name, offset, incarnation, keys]).encode())


def _is_list(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False


def _cursor(row: Row[Any], owner: str | None = None, expired_at: int | None = None) -> Cursor:
    keys, incarnation = tuple(json.loads(row.keys)), row.incarnation or 0
    return Cursor(row.name, row.offset, keys, row.updated_at, owner, incarnation, expired_at)


def _problem(cursor: Cursor, lineage: Lineage, head: int) -> str | None:
    """Return why the event at the position of a cursor is not the one that was acknowledged, or None if it is.

    The beginning is the same in every log. The position of an incarnation that is so old that it may have been
    forgotten is compared with the head only. Version 0.1 stored none, which is incarnation 0 of the logs that it wrote.
    """
    offset, until = cursor.offset, lineage.until(cursor.incarnation)
    if offset > head:
        return f"its position, {offset}, is after the end of the log, {head}: the log was restored or created anew"
    forgotten = len(lineage.incarnations) >= KEPT_MAX and offset < lineage.incarnations[0].first
    if offset == 0 or (until is None and forgotten):
        return None
    if until is None:
        return f"its position, {offset}, is from another log, or from events that were lost when the log was restored"
    if offset > until:
        return f"its position, {offset}, is from events that were lost when the log was restored to offset {until}"
    return None


def _holder(row: Row[Any] | None) -> str:
    return "another subscriber" if row is None or row.owner_pid is None else f"process {row.owner_pid}"


def check_name(name: str) -> None:
    """Raise `CursorError` unless a durable name is short, printable text."""
    if not isinstance(name, str) or not name or len(name) > NAME_MAX or not name.isprintable():
        raise CursorError(str(name), f"a durable name must have 1 to {NAME_MAX} printable characters")


def _prepare(connection: Connection) -> None:
    use_wal(connection)
    connection.execute(CreateTable(_cursors, if_not_exists=True))
    prepare_uses(connection)
    if not columns_of(connection, _cursors) >= _ADDED.keys():
        with transaction(connection):
            there = columns_of(connection, _cursors)  # another process may have added some in the meantime
            for name, kind in _ADDED.items():
                if name not in there:
                    connection.exec_driver_sql(f"ALTER TABLE cursors ADD COLUMN {name} {kind}")


if TYPE_CHECKING:
    _port: type[Cursors] = SqliteCursors
