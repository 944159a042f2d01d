"""SQLite connections for the log: SQLAlchemy over pysqlite3, a version gate, one place for errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pysqlite3
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

from zbus.errors import ConfigInvalid, LogDamaged, LogError, LogFull, LogStopped

# Older versions lose commits when two connections write and checkpoint (the WAL-reset bug).
SQLITE_VERSION_MIN = (3, 51, 3)

PAGE_BYTES = 8192
_FULL, _CORRUPT, _NOTADB = 13, 11, 26
_FSYNC = {1034, 1290}  # SQLITE_IOERR_FSYNC, SQLITE_IOERR_DIR_FSYNC


def check_version() -> None:
    """Refuse a SQLite that loses commits."""
    if pysqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        needed = ".".join(map(str, SQLITE_VERSION_MIN))
        raise ConfigInvalid(
            "log",
            f"SQLite {pysqlite3.sqlite_version} can lose commits; {needed} or later is needed: "
            "pip install --upgrade pysqlite3",
        )


def make_engine(path: str, *, read_only: bool = False, synchronous: str = "FULL") -> Engine:
    """An engine in autocommit mode: each transaction of ours is begun and ended by name.

    A read-only one keeps a few connections and returns text as bytes, which is how pages travel.
    """
    check_version()
    uri = f"file:{quote(path)}?mode={'ro' if read_only else 'rwc'}"

    def connect() -> Any:
        return pysqlite3.connect(uri, uri=True, isolation_level=None, timeout=10.0, check_same_thread=False)

    engine = create_engine(
        "sqlite://",
        module=pysqlite3,
        creator=connect,
        poolclass=QueuePool if read_only else NullPool,
        pool_reset_on_return=None,
        isolation_level="AUTOCOMMIT",
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA journal_size_limit=67108864")
        if read_only:
            connection.text_factory = bytes

    return engine


@contextmanager
def log_errors(path: str) -> Iterator[None]:
    """SQLite's errors become ours, here and nowhere else."""
    try:
        yield
    except DBAPIError as error:
        raise map_error(path, error.orig) from error
    except pysqlite3.Error as error:
        raise map_error(path, error) from error


def map_error(path: str, error: Any) -> LogError:
    """The error of ours for one of SQLite's."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    if code & 0xFF == _FULL:
        return LogFull(path)
    if code in _FSYNC:
        return LogStopped(path, f"fsync failed: {name}")
    if code & 0xFF in (_CORRUPT, _NOTADB):
        return LogDamaged(path, f"SQLite says: {error}")
    return LogError(f"{path}: {name}: {error}. The outcome is unknown: put the same events again")


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """One write transaction; rolled back on any error."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        yield
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def roll_back(connection: Connection) -> None:
    """End a transaction that is still open, if one is: SQLite ends some by itself."""
    driver: Any = connection.connection.dbapi_connection
    if driver.in_transaction:
        connection.exec_driver_sql("ROLLBACK")
