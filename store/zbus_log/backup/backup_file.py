"""The file of a backup: a SQLite database with the tables of a log, and one table that describes the backup.

That table has one row, with the cursors of the log, which are a small database themselves, and the manifest of its
cold tier. So one transaction, or one rename, replaces the whole backup. The file has no write-ahead log and no
head record: it is not opened as a log by mistake.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection

from zbus.errors import ConfigInvalid
from zbus_log.file.database import make_engine, reading_errors

from .log_copy import INFO

FORMAT = 1
NAME = "log.db"  # of the file, if the backup is a folder
COLD = f"{NAME}-cold"  # the folder beside it with the files of the cold tier

CREATE = f"""
CREATE TABLE IF NOT EXISTS main.{INFO} (
    format INTEGER NOT NULL, log TEXT NOT NULL, cut INTEGER NOT NULL, low_water INTEGER NOT NULL, epoch BLOB NOT NULL,
    incarnation INTEGER NOT NULL, digest BLOB NOT NULL, made_at INTEGER NOT NULL, zbus TEXT NOT NULL,
    cursors BLOB NOT NULL, cold BLOB NOT NULL
) STRICT
"""


class BackupInfo(NamedTuple):
    """The description of a backup."""

    format: int
    log: str  # the path of the log
    cut: int  # the last offset that the backup contains
    low_water: int
    epoch: bytes
    incarnation: int
    digest: bytes  # of the events up to the cut; empty if it is unknown
    made_at: int  # Unix ns
    zbus: str  # the version that made it
    cursors: bytes  # a SQLite database; empty if the log has no cursors
    cold: bytes  # the manifest of the cold tier; empty if there is no tier


def file_of(backup: str) -> Path:
    """Return the file of a backup: in the folder, if that is what is given.

    Raises `ConfigInvalid` for an empty path.
    """
    if not backup:
        raise ConfigInvalid("backup", "the path is empty, which would be the current folder. Nothing was changed")
    path = Path(backup)
    return path / NAME if path.is_dir() or backup.endswith("/") else path


def store_info(connection: Connection, info: BackupInfo) -> None:
    """Store the description of a backup. Call it in a transaction."""
    connection.exec_driver_sql(CREATE)
    connection.exec_driver_sql(f"DELETE FROM main.{INFO}")
    marks = ", ".join("?" * len(info))
    connection.exec_driver_sql(f"INSERT INTO main.{INFO} VALUES ({marks})", tuple(info))


def read_info(path: Path) -> BackupInfo:
    """Return what a backup says about itself. Raises `ConfigInvalid` if the file is not a backup."""
    found = find_info(path)
    if found is None:
        raise ConfigInvalid("backup", f"{str(path)!r} is not a backup of a log")
    return found


def find_info(path: Path) -> BackupInfo | None:
    """Return what a backup says about itself, or None if the file is another database. It may be a log in use.

    If an increment was interrupted, SQLite first undoes it, and so writes to the file.
    """
    if not path.is_file():
        raise ConfigInvalid("backup", f"there is no backup {str(path)!r}")
    engine = make_engine(str(path), read_only=not Path(f"{path}-journal").exists())
    try:
        with reading_errors(str(path)), engine.connect() as connection:
            exists = f"SELECT count(*) FROM sqlite_schema WHERE name = '{INFO}'"
            if not connection.exec_driver_sql(exists).scalar_one():
                return None
            version = connection.exec_driver_sql(f"SELECT format FROM {INFO}").scalar_one()
            if version > FORMAT:
                reason = f"{str(path)!r} has format {version}, but this zbus reads up to {FORMAT}: upgrade zbus"
                raise ConfigInvalid("backup", reason)
            row = connection.exec_driver_sql(f"SELECT {', '.join(BackupInfo._fields)} FROM {INFO}").one()
            return BackupInfo(*row)
    finally:
        engine.dispose()
