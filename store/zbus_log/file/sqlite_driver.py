"""The SQLite driver of the log: apsw as a DB-API module, and the SQLAlchemy dialect `sqlite+zbus` for it.

All files of a log are opened with one SQLite library: the one in the wheels of apsw. apsw has wheels for every
platform of the core, and all of them have the same current SQLite, so what the tests show on one platform holds on
the others. The alternatives:

- pysqlite3 has no wheels for Linux arm64 and macOS x86_64. There pip builds it with the system's SQLite.
- The `sqlite3` of the interpreter has the system's SQLite too: 3.40 on Debian 12. Before 3.51.3, commits can be lost if
  two connections write or checkpoint a file at the same moment. A log has one writer, but its cursors have several.
  The log also uses `jsonb_each` (since 3.51) and `ORDER BY` in aggregates, without which 3.40 opens no log.

Two SQLite libraries in one process must never open the same file: POSIX locks belong to the process, so the locks of
one library are lost when the other one closes the file. Therefore code and tests that open a file of a log in a process
that uses zbus open it with `connect` of this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import apsw
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.base import SQLiteDialect

if TYPE_CHECKING:
    from types import ModuleType

# The part of DB-API 2 (PEP 249) that SQLAlchemy uses.
apilevel, paramstyle, threadsafety = "2.0", "qmark", 1
Binary = bytes
Error = apsw.Error
sqlite_version = apsw.sqlite_lib_version()
sqlite_version_info = tuple(map(int, sqlite_version.split(".")))

_OPEN = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI


def connect(uri: str | os.PathLike[str], *, timeout_s: float = 5.0) -> Connection:
    """Open a connection in autocommit mode. `uri` is a path, or a URI such as `file:app.db?mode=ro`."""
    connection = Connection(os.fspath(uri))
    connection.set_busy_timeout(int(timeout_s * 1000))
    return connection


class Cursor(apsw.Cursor):
    """A cursor that knows its columns even if the statement returns no row."""

    description: Any = None  # the property of apsw raises after the last row
    arraysize = 1
    rowcount = -1  # not known without another call, which each commit would make: see `changed_rows` in `database`

    @property
    def lastrowid(self) -> int:
        """The id of the last row that was inserted."""
        return self.connection.last_insert_rowid()

    def fetchmany(self, size: int | None = None) -> list[Any]:
        """Return the next rows, at most `size`."""
        return list(islice(self, size or self.arraysize))


_columns = apsw.Cursor.description.__get__  # type: ignore[attr-defined]


def _describe(cursor: Any, sql: str, values: Any) -> bool:
    """Note the columns of a statement before its first step: after its last row, apsw does not know them any more."""
    if isinstance(cursor, Cursor):  # apsw passes the connection for the statements of `with connection`
        cursor.description = _columns(cursor) or None
    return True


class Connection(apsw.Connection):
    """A connection in autocommit mode: transactions are begun with `BEGIN`."""

    def __init__(self, uri: str, **how: Any) -> None:
        super().__init__(uri, flags=_OPEN, **how)
        self.cursor_factory = Cursor
        self.exec_trace = _describe

    def commit(self) -> None:
        """Commit the open transaction, if any."""
        if self.in_transaction:
            self.execute("COMMIT")

    def rollback(self) -> None:
        """Roll back the open transaction, if any."""
        if self.in_transaction:
            self.execute("ROLLBACK")

    def copy_to(self, target: Connection, pages: int, copied: Callable[[int, int], None]) -> None:
        """Copy the database into `target`. After each step of `pages`, calls `copied` with the rest and the total."""
        with target.backup("main", self, "main") as backup:
            while not backup.done:
                backup.step(pages)
                copied(backup.remaining, backup.page_count)


class ZbusDialect(SQLiteDialect):
    """The `sqlite+zbus` dialect."""

    driver = "zbus"
    default_paramstyle = "qmark"
    supports_statement_cache = True
    returns_native_bytes = True
    dbapi_exception_translation_map: Mapping[str, str] = {
        "ConstraintError": "IntegrityError",
        "MismatchError": "IntegrityError",
        "BindingsError": "ProgrammingError",
        "MisuseError": "ProgrammingError",
        "ThreadingViolationError": "ProgrammingError",
        "TooBigError": "DataError",
        "CorruptError": "DatabaseError",
        "NotADBError": "DatabaseError",
        "InternalError": "InternalError",
        "Error": "OperationalError",
    }

    @classmethod
    def import_dbapi(cls) -> ModuleType:
        """Return this module."""
        from . import sqlite_driver

        return sqlite_driver

    def retrieve_dbapi_version(self, dbapi: Any) -> Any:
        """Return nothing: the version of SQLite is the one that matters."""
        return None

    def _get_server_version_info(self, connection: Any) -> Any:
        return sqlite_version_info

    def get_isolation_level_values(self, dbapi_conn: Any) -> Sequence[Any]:
        """Return the only mode: autocommit."""
        return ("AUTOCOMMIT",)

    def set_isolation_level(self, dbapi_connection: Any, level: Any) -> None:
        """Do nothing: connections are in autocommit mode."""

    def detect_autocommit_setting(self, dbapi_conn: Any) -> bool:
        """Return True: connections are in autocommit mode."""
        return True


registry.register("sqlite.zbus", __name__, "ZbusDialect")
