"""Forks of a log, for rehearsals: a copy up to some offset that is another log, and that sends nothing.

A fork has its own log id and its own lineage, so no other node takes it for the log that it was made of. It has no
cursors: handlers run over its events as if for the first time. A mark in its file keeps it from being opened with a
transport, until the fork is promoted to an ordinary log.
"""

from __future__ import annotations

import secrets
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from zbus.errors import ConfigInvalid
from zbus_log.cold.tier import Cold
from zbus_log.file.database import log_errors, make_engine, reading_errors, transaction
from zbus_log.file.fork_mark import MARK, mark_fork, read_mark
from zbus_log.file.head_record import HeadRecord
from zbus_log.file.incarnations import add_incarnation, new_incarnation
from zbus_log.file.tables import get_epoch, origin_of, prepare, set_epoch

from . import cold_copy
from .backup_file import file_of, find_info
from .log_copy import Contents, LogCopy, Progress, contents
from .new_log import NewLog
from .restore import offset_at


class Fork(NamedTuple):
    """Result of a fork."""

    cut: int  # the last offset that it has in common with the log
    log_id: int  # of the fork


def fork(
    log: str,
    target: str,
    *,
    at: int | datetime | None = None,
    cold: str | None = None,
    progress: Progress | None = None,
) -> Fork:
    """Make the log `target` from a log or a backup, up to the offset or time `at`, or all of it.

    `cold` is the folder of the cold tier of a log. A backup has its own beside it.
    """
    source = str(file_of(log))
    if not Path(source).is_file():
        raise ConfigInvalid("log", f"there is no log or backup {source!r}")
    with NewLog(target) as new:
        new.check_free()
        info = find_info(Path(source))
        tier = Path(f"{source}-cold" if cold is None or info is not None else cold)
        copy = LogCopy(source, new.path, progress, of_backup=info is not None)
        copied = copy.whole() if at is None else copy.rows(until=offset_at(source, at))
        if info is None:
            manifest = cold_copy.tier_until(tier, copied)
        else:
            manifest = cold_copy.until_cut(cold_copy.decode(tier, info.cold), copied)
        made = _separate(new.path, copied)
        if manifest is not None:
            place = Path(f"{new.path}-cold")
            cold_copy.copy_files(manifest, tier, place, share=True)
            cold_copy.write_manifest(manifest, place)
            _adopt(place, made.epoch)
        new.record_head(made)
        new.put_in_place()
    return Fork(made.cut, origin_of(made.epoch))


def promote(log: str) -> None:
    """Turn a fork into an ordinary log, which may be opened with a transport. It keeps its own log id."""
    if not Path(log).is_file():
        raise ConfigInvalid("log", f"there is no log {log!r}")
    record = HeadRecord(log)  # or `LogLocked`
    try:
        engine = make_engine(log)
        try:
            with log_errors(log, writing=True), engine.connect() as connection:
                if read_mark(connection) is None:
                    raise ConfigInvalid("log", f"{log!r} is not a fork: it may be opened with a transport")
                connection.exec_driver_sql(f"DROP TABLE {MARK}")
        finally:
            engine.dispose()
    finally:
        record.close()


def _separate(path: str, copied: Contents) -> Contents:
    """Give a copy its own log id and lineage, and the mark of a fork."""
    engine = make_engine(path)
    try:
        with reading_errors(path), engine.connect() as connection:
            prepare(connection, path)
            connection.exec_driver_sql("PRAGMA journal_mode=DELETE").close()
            with transaction(connection):
                of = origin_of(get_epoch(connection))
                set_epoch(connection, secrets.token_bytes(16))
                connection.exec_driver_sql("DELETE FROM incarnations")
                add_incarnation(connection, new_incarnation(1))
                mark_fork(connection, of, copied.cut, time.time_ns())
    finally:
        engine.dispose()
    return contents(path)


def _adopt(folder: Path, epoch: bytes) -> None:
    cold = Cold(folder)
    try:
        cold.adopt(epoch)
    finally:
        cold.close()
