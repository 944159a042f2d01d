"""SQLite connections for the log: their settings, a version check, and the mapping of errors."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakSet

import apsw
from sqlalchemy import Connection, Engine, Row, Table, create_engine, event, null, select
from sqlalchemy.exc import DBAPIError, NoResultFound
from sqlalchemy.pool import NullPool, QueuePool

from zbus.errors import ConfigInvalid, LogDamaged, LogError, LogFull, LogWriterFailed
from zbus.util.atomic_file import fsync
from zbus.util.malformed import MALFORMED
from zbus.util.process import on_fork

from . import sqlite_driver

# Older versions lose commits when two connections write and checkpoint (the WAL-reset bug).
SQLITE_VERSION_MIN = (3, 51, 3)

PAGE_BYTES = 8192
WAL_BYTES = 1000 * (PAGE_BYTES + 24)  # the length at which SQLite checkpoints and starts over
LOCK_WAIT_S = 10.0
OTHER_FILE = "It is not a zbus log or backup, or its beginning is damaged: check the path, or restore the file"
_BUSY, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _NOTADB = 5, 8, 10, 11, 13, 14, 26


def check_version() -> None:
    """Raise `ConfigInvalid` if this SQLite can lose commits."""
    if sqlite_driver.sqlite_version_info < SQLITE_VERSION_MIN:
        needed = ".".join(map(str, SQLITE_VERSION_MIN))
        raise ConfigInvalid(
            "log",
            f"apsw has SQLite {sqlite_driver.sqlite_version}, which can lose commits; {needed} or later is needed. The "
            f"wheels of apsw contain one: python -m pip install --force-reinstall --only-binary=apsw 'apsw>={needed}'",
        )


class _SqliteConnection(sqlite_driver.Connection):
    """A connection that only the process that opened it closes: closing one removes locks and the write-ahead log."""

    path: str
    is_inherited = False

    def close(self, force: bool = False) -> None:
        """Close the connection, unless it was inherited from a parent process."""
        if not self.is_inherited:
            super().close(force)
            _files.closed(self)


class _OpenFiles:
    """The connections of this process, and the files that a parent process had open when it forked this one.

    SQLite keeps its locks by process and file, and a forked process inherits the list of them, but not the locks. So
    the inherited connections are neither used nor closed, and their files are not opened again.
    """

    def __init__(self) -> None:
        self._connections: WeakSet[_SqliteConnection] = WeakSet()
        self._engines: WeakSet[Engine] = WeakSet()
        self._inherited: dict[tuple[int, int], int] = {}  # the parent process, by device and inode
        on_fork(self)

    def add_engine(self, engine: Engine) -> None:
        """Drop the connections of an engine in forked processes."""
        self._engines.add(engine)

    def connect(self, path: str, uri: str) -> _SqliteConnection:
        """Open a connection. Raises `LogError` if a parent process had the file open when it forked this one."""
        if self._inherited and (parent := self._inherited.get(_file_id(path))) is not None:
            raise LogError(
                f"{path} was open in process {parent} when it forked this process, which therefore cannot use it; "
                "this call changed nothing. Start processes with 'spawn', or open the log after forking"
            )
        connection = _SqliteConnection(uri)
        connection.set_busy_timeout(int(LOCK_WAIT_S * 1000))
        connection.path = path
        self._connections.add(connection)
        return connection

    def closed(self, connection: _SqliteConnection) -> None:
        """Forget a connection that was closed."""
        self._connections.discard(connection)

    def forked(self, parent: int) -> None:
        """Drop all connections without closing them."""
        for connection in list(self._connections):
            connection.is_inherited = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # or the interpreter would close it at its end
            self._inherited[_file_id(connection.path)] = parent
        self._connections.clear()
        for engine in list(self._engines):
            engine.dispose(close=False)
        on_fork(self)


def _file_id(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


_files = _OpenFiles()


def make_engine(path: str, *, read_only: bool = False, synchronous: str = "FULL") -> Engine:
    """Return an engine in autocommit mode: this package begins and ends each transaction explicitly.

    A read-only engine pools a few connections.
    """
    check_version()
    uri = f"file:{quote(path)}?mode={'ro' if read_only else 'rwc'}"

    def connect() -> Any:
        return _files.connect(path, uri)

    engine = create_engine(
        "sqlite+zbus://",
        creator=connect,
        poolclass=QueuePool if read_only else NullPool,
        pool_reset_on_return=None,
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,  # payloads do not belong in error messages
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA journal_size_limit=67108864")
        # Leave no copies of rows in the free space of pages, which a purge could not find. It costs no writes.
        connection.execute("PRAGMA secure_delete=FAST")
        connection.execute("PRAGMA temp_store=MEMORY")
        if sys.platform == "darwin":  # where fsync alone leaves commits in the cache of the disk
            connection.execute("PRAGMA fullfsync=ON")
            connection.execute("PRAGMA checkpoint_fullfsync=ON")

    _files.add_engine(engine)
    return engine


def lengthen_wal(path: str) -> None:
    """Fill the write-ahead log to its usual length with zeros, which SQLite treats as the end of the valid part.

    A commit that extends the file must also sync its new length, and took 360 µs instead of 170. SQLite reuses the
    file once it has this length, but starts with an empty file after each open. SQLite holds no lock on this file, so
    opening and closing it here is safe.
    """
    wal = Path(f"{path}-wal")
    if not wal.exists() or shutil.disk_usage(wal.parent).free < 64 * WAL_BYTES:
        return
    with wal.open("r+b", buffering=0) as file:
        length = file.seek(0, os.SEEK_END)
        while length < WAL_BYTES:
            length += file.write(bytes(min(1 << 20, WAL_BYTES - length)))
        fsync(file.fileno())


@contextmanager
def log_errors(path: str, writing: bool = False) -> Iterator[None]:
    """Map the errors of SQLite to `LogError`."""
    try:
        yield
    except SQLITE_ERRORS as error:
        raise as_log_error(path, error, writing) from error


@contextmanager
def reading_errors(path: str) -> Iterator[None]:
    """Map the errors of SQLite, and those of values that have another type or form than they were stored with."""
    try:
        with log_errors(path):
            yield
    except _MALFORMED as error:
        raise LogDamaged(path, f"it contains a malformed value ({type(error).__name__}: {error})") from error


SQLITE_ERRORS = (DBAPIError, apsw.Error, UnicodeDecodeError)  # the last one: text of a damaged file
_MALFORMED = (*MALFORMED, TypeError, ValueError, OverflowError, struct.error, NoResultFound)


def as_log_error(path: str, error: Exception, writing: bool) -> LogError:
    """Return the `LogError` for an error of SQLite. A context manager per commit would slow down the writer."""
    return _map_error(path, error.orig if isinstance(error, DBAPIError) else error, writing)


def _code(error: Any) -> int:
    """Return the extended result code of an error of SQLite; 0 if there is no code."""
    return getattr(error, "extendedresult", None) or 0


def _map_error(path: str, error: Any, writing: bool) -> LogError:
    if isinstance(error, UnicodeDecodeError):
        return LogDamaged(path, "it contains text that is not UTF-8")
    code = _code(error)
    name = apsw.mapping_extended_result_codes.get(code) or apsw.mapping_result_codes.get(code) or type(error).__name__
    if code & 0xFF == _FULL:
        return LogFull(path)
    if code & 0xFF == _IOERR and writing:
        # The driver does not distinguish a failed fsync from a failed write. After either, the state of the
        # kernel's page cache is unknown, and a retry could acknowledge events that are not on disk.
        return LogWriterFailed(path, f"a write or fsync failed: {name}")
    if code & 0xFF in (_CORRUPT, _NOTADB):
        advice = OTHER_FILE if code & 0xFF == _NOTADB else ""
        return LogDamaged(path, f"SQLite says: {error}", advice=advice)
    if code & 0xFF == _CANTOPEN:
        return LogError(
            f"{path}: {name}: SQLite could not open it or one of the files beside it. Nothing was changed. Even "
            f"reading a log needs a folder in which {path}-shm can be created: if it is read-only, copy the log, with "
            "all files whose names begin with its name, to a folder that is not, and open it there"
        )
    if writing:
        return LogError(f"{path}: {name}: {error}")  # whether events were stored, the writer finds out
    return LogError(f"{path}: {name}: {error}. This call changed nothing")


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Run one write transaction. It is rolled back on any error."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    with _committing(connection):
        yield


@contextmanager
def _committing(connection: Connection) -> Iterator[None]:
    try:
        yield
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def use_wal(connection: Connection) -> None:
    """Give a file a write-ahead log. A file that can only be read stays as it is."""
    try:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    except DBAPIError as error:
        if _code(error.orig) & 0xFF != _READONLY:
            raise


class SharedWrites:
    """Write transactions on a file that several processes write. Each waits for the lock, but not while closing.

    SQLite's own wait for a lock cannot be ended early, so this waits in short steps.
    """

    _STEP_MS = 50

    def __init__(self) -> None:
        self._end = math.inf

    def end(self, timeout_s: float) -> None:
        """Wait for a lock at most until `timeout_s` seconds from now, in transactions that wait already too."""
        self._end = time.monotonic() + timeout_s

    @contextmanager
    def transaction(self, connection: Connection) -> Iterator[None]:
        """Run one write transaction. It is rolled back on any error."""
        connection.exec_driver_sql(f"PRAGMA busy_timeout={self._STEP_MS}")
        give_up = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                break
            except DBAPIError as error:
                if _code(error.orig) & 0xFF != _BUSY or time.monotonic() >= min(give_up, self._end):
                    raise
        with _committing(connection):
            yield


@contextmanager
def snapshot(connection: Connection) -> Iterator[None]:
    """Give several statements the same view of the file."""
    connection.exec_driver_sql("BEGIN")
    try:
        yield
    finally:
        roll_back(connection)


def find_damage(path: str) -> list[str]:
    """Return what SQLite finds wrong with a database; nothing if it does not exist."""
    if not Path(path).is_file():
        return []
    engine = make_engine(path, read_only=True)
    try:
        with log_errors(path), engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
            return [f"{path}: {each}" for each in found if each != "ok"]
    except LogError as error:
        return [str(error)]
    finally:
        engine.dispose()


def free_pages(connection: Connection) -> None:
    """Give the free pages back to the file system."""
    driver: Any = connection.connection.dbapi_connection
    driver.execute("PRAGMA incremental_vacuum").fetchall()  # it frees one page per row; SQLAlchemy would fetch only one


def columns_of(connection: Connection, table: Table) -> set[str]:
    """Return the names of the columns that a table has in the file; none if it does not exist there."""
    return set(connection.exec_driver_sql("SELECT name FROM pragma_table_info(?)", (table.name,)).scalars())


def read_table(connection: Connection, table: Table) -> Sequence[Row[Any]]:
    """Return the rows of a table that the file may not have, by primary key, without writing.

    Columns that an older version did not have are None.
    """
    there = columns_of(connection, table)
    if not there:
        return []
    columns = [each if each.name in there else null().label(each.name) for each in table.columns]
    return connection.execute(select(*columns).order_by(*table.primary_key)).all()


def changed_rows(connection: Connection) -> int:
    """Return how many rows the last statement that writes has changed."""
    driver: Any = connection.connection.dbapi_connection
    return int(driver.changes())


def roll_back(connection: Connection) -> None:
    """Roll back the open transaction, if any: SQLite has ended it already after some errors."""
    driver: Any = connection.connection.dbapi_connection
    if driver.in_transaction:
        connection.exec_driver_sql("ROLLBACK")
