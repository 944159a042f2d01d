"""The mark of a fork in the file of a log: which log it was made of, and up to which offset.

Only forks have this table. It keeps them from being opened with a transport: a fork is for rehearsals.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection

MARK = "fork"


class ForkMark(NamedTuple):
    """The log that a fork was made of."""

    log_id: int
    offset: int  # the last one that they have in common
    made_at: int  # Unix ns


def mark_fork(connection: Connection, log_id: int, offset: int, made_at: int) -> None:
    """Mark a log as a fork. Call it in a transaction."""
    connection.exec_driver_sql(f"DROP TABLE IF EXISTS {MARK}")
    connection.exec_driver_sql(
        f"CREATE TABLE {MARK} (log_id INTEGER NOT NULL, at INTEGER NOT NULL, made_at INTEGER NOT NULL) STRICT"
    )
    connection.exec_driver_sql(f"INSERT INTO {MARK} VALUES (?, ?, ?)", (log_id, offset, made_at))


def read_mark(connection: Connection) -> ForkMark | None:
    """Return the mark of a fork, or None if the log is an ordinary one."""
    if not connection.exec_driver_sql(f"SELECT count(*) FROM sqlite_schema WHERE name = '{MARK}'").scalar_one():
        return None
    return ForkMark(*connection.exec_driver_sql(f"SELECT log_id, at, made_at FROM {MARK}").one())
