"""Cursors: the acknowledged position of each durable subscription.

They are in a separate SQLite file beside the log, because a durable subscriber may run in another
process than the log's owner, and the log's file has only one writer. A lease is a token, with which
positions are stored, and a lock, which ends with its process.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from sqlalchemy import INTEGER, TEXT, Column, Connection, MetaData, Row, Table, bindparam, delete, select, update
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.schema import CreateTable

from zbus.errors import CursorError, LogError, ZbusError
from zbus.observe.records import record_reason
from zbus.ports.log import Cursor, Lease
from zbus_log.file.database import log_errors, make_engine, transaction
from zbus_log.file.name_locks import NameLock, NameLocks

from .positions import SqlitePositions

if TYPE_CHECKING:
    from zbus.ports.log import Cursors

NAME_MAX = 200
RETRY_S = 0.25

_cursors = Table(
    "cursors",
    MetaData(),
    Column("name", TEXT, primary_key=True),
    Column("offset", INTEGER, nullable=False),
    Column("keys", TEXT, nullable=False),
    Column("updated_at", INTEGER, nullable=False),
    Column("owner_pid", INTEGER),  # for messages: whether the lease is held, its lock says
    Column("token", TEXT),
    sqlite_strict=True,
)
_ADVANCE = (
    update(_cursors)
    .where(
        _cursors.c.name == bindparam("which"),
        _cursors.c.token == bindparam("lease"),
        _cursors.c.offset < bindparam("position"),
    )
    .values(offset=bindparam("position"), updated_at=bindparam("now"))
)

Done = Callable[[ZbusError | None], None]


class SqliteCursors:
    """The cursors of one log. Every method except `advance` may block."""

    def __init__(self, log_path: str) -> None:
        self.path = f"{log_path}-cursors"
        self._engine = make_engine(self.path)
        self.positions = SqlitePositions(self.path, self._engine)
        self._locks = NameLocks(f"{log_path}-leases")
        self._held: dict[tuple[str, str], NameLock] = {}  # by name and token
        self._pending: dict[tuple[str, str], int] = {}  # positions by name and token
        self._waiting: list[tuple[tuple[str, str], Done]] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._flushing = threading.Lock()
        self._connection: Connection | None = None  # kept open for positions; used only while holding `_flushing`

    def claim(self, name: str, keys: Sequence[str], start: int) -> Lease:
        """Take the lease of a durable name. Raises `CursorError` if a running process holds it."""
        check_name(name)
        token = secrets.token_hex(16)
        with ExitStack() as undo, log_errors(self.path), self._engine.connect() as connection:
            _prepare(connection)
            with transaction(connection):
                row = connection.execute(select(_cursors).where(_cursors.c.name == name)).one_or_none()
                lock = self._locks.take(name)
                if lock is None:
                    here = row is not None and row.owner_pid == os.getpid()
                    where = "this process has it open already: " if here else ""
                    raise CursorError(
                        name,
                        f"{where}{_holder(row)} holds its lease; a durable subscription has one subscriber at a time",
                    )
                undo.callback(lock.close)
                owner = {"owner_pid": os.getpid(), "keys": json.dumps(list(keys)), "token": token}
                connection.execute(
                    upsert(_cursors)
                    .values(name=name, offset=start, updated_at=time.time_ns(), **owner)
                    .on_conflict_do_update(index_elements=["name"], set_=owner)
                )
            undo.pop_all()
        self._held[name, token] = lock
        self._start()
        return Lease(token, start, ()) if row is None else Lease(token, int(row.offset), tuple(json.loads(row.keys)))

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
        """Store the pending positions and release the lease."""
        self._flush()
        with log_errors(self.path), self._engine.connect() as connection, transaction(connection):
            connection.execute(
                update(_cursors)
                .where(_cursors.c.name == name, _cursors.c.token == token)
                .values(owner_pid=None, token=None)
            )
        if (lock := self._held.pop((name, token), None)) is not None:
            lock.close()

    def list(self) -> Sequence[Cursor]:
        """Return every cursor, by name."""
        if not os.path.exists(self.path):  # noqa: PTH110 - the log never had a cursor
            return []
        with log_errors(self.path), self._engine.connect() as connection:
            _prepare(connection)
            rows = connection.execute(select(_cursors).order_by(_cursors.c.name)).all()
        return [
            Cursor(
                row.name,
                row.offset,
                tuple(json.loads(row.keys)),
                row.updated_at,
                _holder(row) if row.token is not None and self._locks.is_held(row.name) else None,
            )
            for row in rows
        ]

    def lowest(self) -> Cursor | None:
        """Return the cursor that is furthest behind, where retention stops; None if there are no cursors."""
        return min(self.list(), key=lambda cursor: cursor.offset, default=None)

    def reset(self, name: str, offset: int) -> None:
        """Move a cursor in either direction. Raises `CursorError` if a subscriber uses it."""
        self._change(name, offset)

    def delete(self, name: str) -> None:
        """Delete a cursor. Raises `CursorError` if a subscriber uses it."""
        self._change(name, None)

    def close(self, timeout_s: float) -> None:
        """Store the pending positions and stop."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._flushing:
            if self._connection is not None:
                self._connection.close()
        while self._held:
            self._held.popitem()[1].close()
        self._engine.dispose()

    def _change(self, name: str, offset: int | None) -> None:
        found = {cursor.name: cursor for cursor in self.list()}.get(name)
        if found is None:
            raise CursorError(name, "there is no such cursor")
        with log_errors(self.path), self._engine.connect() as connection, transaction(connection):
            lock = self._locks.take(name)
            if lock is None:
                raise CursorError(name, f"{found.owner or 'another process'} uses it; stop that process first")
            with closing(lock):
                if offset is None:
                    connection.execute(delete(_cursors).where(_cursors.c.name == name))
                    self._locks.remove(name)
                else:
                    moved = update(_cursors).where(_cursors.c.name == name)
                    connection.execute(moved.values(offset=offset, updated_at=time.time_ns()))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zbus-log-cursors", daemon=True)
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

    def _writing(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
        return self._connection

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
        for lease, done in waiting:
            lost = CursorError(
                lease[0],
                "the subscription was closed, or another subscriber has its lease; the position was not stored",
            )
            done(error if error is not None or lease in held else lost)
        return error

    def _store(self, pending: Mapping[tuple[str, str], int]) -> set[tuple[str, str]]:
        """Store positions. Returns the leases that are still held."""
        now = time.time_ns()
        rows = [
            {"which": name, "lease": token, "position": offset, "now": now} for (name, token), offset in pending.items()
        ]
        with log_errors(self.path), transaction(self._writing()):
            self._writing().execute(_ADVANCE, rows)
            names = {name for name, _ in pending}
            found = self._writing().execute(select(_cursors.c.name, _cursors.c.token).where(_cursors.c.name.in_(names)))
            held = {(row.name, row.token) for row in found}
        for name, _ in pending.keys() - held:
            reason = "the subscription was closed, or another subscriber claimed the name"
            record_reason("LEASE_LOST", logging.WARNING, code="lease_lost", reason=reason, durable=name)
        return held & pending.keys()


def _holder(row: Row[Any] | None) -> str:
    return "another subscriber" if row is None or row.owner_pid is None else f"process {row.owner_pid}"


def check_name(name: str) -> None:
    """Raise `CursorError` unless a durable name is short, printable text."""
    if not isinstance(name, str) or not name or len(name) > NAME_MAX or not name.isprintable():
        raise CursorError(str(name), f"a durable name must have 1 to {NAME_MAX} printable characters")


def _prepare(connection: Connection) -> None:
    connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    connection.execute(CreateTable(_cursors, if_not_exists=True))
    if not _has_token(connection):  # the first version had no tokens
        with transaction(connection):
            if not _has_token(connection):  # another process may have added it in the meantime
                connection.exec_driver_sql("ALTER TABLE cursors ADD COLUMN token TEXT")


def _has_token(connection: Connection) -> bool:
    return "token" in connection.exec_driver_sql("SELECT name FROM pragma_table_info('cursors')").scalars().all()


if TYPE_CHECKING:
    _port: type[Cursors] = SqliteCursors
