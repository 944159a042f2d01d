"""Makes a backup of a log, beside its owner if it has one: a full one, or the events since the last one.

Positions are read before the log is copied, and the manifest of the cold tier after that, so no cursor is above the
cut, and no event below it is missing from both the log and the tier. A full backup is written beside the old one and
renamed; if it replaces one, it is verified first, because the old one may have events that are damaged in the log by
now. An increment is written beside the backup too, and then joined to it in one transaction. A process that is
killed leaves the last complete backup.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection

from zbus.errors import ConfigInvalid, LogDamaged, LogError
from zbus.ports.log import Backup
from zbus.util.atomic_file import sync
from zbus.version import __version__
from zbus_log.file.chain import digest_at
from zbus_log.file.database import make_engine, reading_errors, snapshot, transaction
from zbus_log.file.incarnations import read_lineage
from zbus_log.file.manifest import Manifest
from zbus_log.file.removed import count_between
from zbus_log.file.tables import LINEAGE_SINCE, file_version, get_epoch, get_head, get_low_water, get_state, origin_of
from zbus_log.read.reader import readable

from . import cold_copy
from .backup_file import COLD, FORMAT, BackupInfo, file_of, read_info, store_info
from .check import verify_backup
from .log_copy import INFO, Contents, LogCopy, Progress, digest_in, remove_database

LOCK_WAIT_S = 0.1

_SCHEMA = f"SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name != '{INFO}' ORDER BY name"


def make_backup(
    log: str,
    target: str,
    *,
    cold: str | None = None,
    progress: Progress | None = None,
    check: Callable[[], None] = lambda: None,
) -> Backup:
    """Back up the log at `log` into the file `target`, or into a folder, if it is one or ends with a slash.

    If there is a backup of this log already, only the newer events are added. `cold` is the folder of the cold tier.
    `check` is called between short steps; if it raises, the earlier backup stays as it is.
    """
    making = _Making(log, target, f"{log}-cold" if cold is None else cold, progress, check)
    try:
        return making.make()
    except OSError as error:
        raise LogError(
            f"the backup to {target} failed: {error}. The log was not changed, and an earlier backup is as it was"
        ) from error


class _Making:
    def __init__(self, log: str, target: str, cold: str, progress: Progress | None, check: Callable[[], None]) -> None:
        self._log, self._cold, self._progress, self._check = log, Path(cold), progress, check
        self._file = file_of(target)
        self._is_folder = self._file != Path(target)
        self._partial = str(self._file.with_name(f".{self._file.name}.partial"))

    def make(self) -> Backup:
        readable(self._log).dispose()
        if self._is_folder:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        elif not self._file.parent.is_dir():
            raise ConfigInvalid("backup", f"the folder {str(self._file.parent)!r} does not exist")
        if self._file.exists() and Path(self._log).exists() and self._file.samefile(self._log):
            raise ConfigInvalid("backup", f"{str(self._file)!r} is the log itself")
        with _locked(self._file, self._check):
            try:
                known = read_info(self._file) if self._file.exists() else None
                cursors = read_cursors(self._log, self._file.parent)
                if known is not None and self._continues(known):
                    return self._add(known, cursors)
                return self._make_whole(cursors)
            finally:
                remove_database(self._partial)

    def _make_whole(self, cursors: bytes) -> Backup:
        copied = LogCopy(self._log, self._partial, self._progress, self._check).whole()
        info = self._describe(copied, cursors)
        engine = make_engine(self._partial, synchronous="OFF")
        try:
            with reading_errors(self._partial), engine.connect() as connection, transaction(connection):
                store_info(connection, info)
        finally:
            engine.dispose()
        self._check()
        if self._file.exists():
            self._check_whole()
        sync(Path(self._partial))
        Path(self._partial).replace(self._file)
        sync(self._file.parent)
        return self._result(info, copied.low_water, is_full=True)

    def _check_whole(self) -> None:
        """Raise `LogDamaged` if the copy has a problem, before it replaces a backup that may not have it."""
        problems = verify_backup(self._partial, lambda done, total: self._check()).problems
        if problems:
            reason = (
                f"a full copy of it has problems ({problems[0]}; {len(problems)} in total), so the backup "
                f"{str(self._file)!r} was not replaced. It may have what is damaged in the log. To copy the log as it "
                "is, give another target"
            )
            raise LogDamaged(self._log, reason)

    def _add(self, known: BackupInfo, cursors: bytes) -> Backup:
        """Add what is newer than the backup."""
        sealed = _newest_block(self._file)
        copied = LogCopy(self._log, self._partial, self._progress, self._check).rows(after=known.cut, sealed=sealed)
        since = copied.low_water, known.cut
        if _removals_in(self._partial, *since) != _removals_in(self._file, *since):  # since the two were compared
            return self._make_whole(cursors)
        info = self._describe(copied, cursors)
        engine = make_engine(str(self._file), synchronous="FULL")
        try:
            with reading_errors(str(self._file)), engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=DELETE").close()
                connection.exec_driver_sql("ATTACH ? AS increment", (self._partial,))
                with transaction(connection):
                    _join(connection)
                    info = info._replace(digest=digest_at(connection, info.cut))
                    self._check_digest(info)
                    store_info(connection, info)
                    self._check()
        finally:
            engine.dispose()
        return self._result(info, max(known.cut, copied.low_water), is_full=False)

    def _check_digest(self, info: BackupInfo) -> None:
        there = digest_in(self._log, info.cut)
        if info.digest and there and info.digest != there:
            reason = f"the digest of its events up to offset {info.cut} does not match the backup {str(self._file)!r}"
            raise LogDamaged(self._log, reason)

    def _continues(self, known: BackupInfo) -> bool:
        """Return whether an increment is possible. Raises `ConfigInvalid` if the backup is of another history."""
        engine = readable(self._log)
        try:
            with reading_errors(self._log), engine.connect() as connection, snapshot(connection):
                self._check_history(connection, known)
                if get_low_water(connection) > known.cut:
                    return False  # retention removed all that the backup has, and more
                low_water = get_low_water(connection)
                schema, removals = _schema(connection), _removals(connection, low_water, known.cut)
        finally:
            engine.dispose()
        # An increment does not remove events from the middle of the backup.
        return schema == _schema_of(self._file) and removals == _removals_in(self._file, low_water, known.cut)

    def _check_history(self, connection: Connection, known: BackupInfo) -> None:
        epoch, head = get_epoch(connection), get_head(connection)
        digest = digest_at(connection, known.cut)
        shared = read_lineage(connection).shared({known.incarnation: known.cut})
        if epoch != known.epoch:
            reason = f"it is of the log {origin_of(known.epoch):x}, and this one is {origin_of(epoch):x}"
        elif head < known.cut:
            reason = f"it has events up to offset {known.cut}, and this log only up to {head}"
        elif shared != known.cut:
            reason = (
                f"this log was restored to offset {shared or 0}, and the backup has later events, up to {known.cut}"
            )
        elif digest and known.digest and digest != known.digest:
            reason = f"its events up to offset {known.cut} differ from those of this log"
        else:
            return
        raise ConfigInvalid(
            "backup",
            f"{str(self._file)!r} is the backup of another history: {reason}. Nothing was changed. Give another target",
        )

    def _describe(self, copied: Contents, cursors: bytes) -> BackupInfo:
        manifest = self._copy_cold(copied)
        return BackupInfo(
            FORMAT,
            str(Path(self._log).absolute()),
            copied.cut,
            copied.low_water,
            copied.epoch,
            copied.incarnation,
            copied.digest,
            time.time_ns(),
            __version__,
            cursors,
            cold_copy.encode(manifest),
        )

    def _copy_cold(self, copied: Contents) -> Manifest | None:
        manifest = cold_copy.tier_until(self._cold, copied)
        if manifest is None:
            return None
        if not self._is_folder:
            raise ConfigInvalid(
                "backup",
                f"the log has a cold tier, {str(self._cold)!r}, whose files need a folder: end the target with a slash",
            )
        cold_copy.copy_files(manifest, self._cold, self._file.with_name(COLD), self._check)
        return manifest

    def _result(self, info: BackupInfo, after: int, *, is_full: bool) -> Backup:
        """Return what was made, and how many events it has after an offset."""
        path = self._file.parent if self._is_folder else self._file
        added = info.cut - after - _count_missing(self._file, after + 1, info.cut)
        log_id = origin_of(info.epoch)
        return Backup(str(path), info.cut, added, log_id, info.incarnation, info.digest, info.made_at, is_full)


def read_cursors(log: str, folder: Path) -> bytes:
    """Return the cursors and positions beside a log as a database of their own; empty if there are none."""
    path = f"{log}-cursors"
    if not Path(path).is_file():
        return b""
    engine = make_engine(path, read_only=True)
    with tempfile.TemporaryDirectory(prefix=".zbus-backup-", dir=folder) as place:
        copy = Path(place) / "cursors"
        try:
            with reading_errors(path), engine.connect() as connection:
                connection.exec_driver_sql("VACUUM INTO ?", (str(copy),))
        finally:
            engine.dispose()
        return copy.read_bytes()


def _join(connection: Connection) -> None:
    """Join an increment to a backup, which then has the events that the log has at the new cut, and no others."""
    tables = connection.exec_driver_sql(
        f"SELECT name FROM main.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name != '{INFO}'"
    )
    # The state comes first: it permits removing the events up to its low-water mark.
    for name in sorted(tables.scalars().all(), key=lambda each: each != "state"):
        if name not in ("events", "by_key", "runs"):
            connection.exec_driver_sql(f'DELETE FROM main."{name}"')
            connection.exec_driver_sql(f'INSERT INTO main."{name}" SELECT * FROM increment."{name}"')
    connection.exec_driver_sql("DELETE FROM main.events WHERE offset <= (SELECT low_water FROM main.state)")
    connection.exec_driver_sql("INSERT INTO main.events SELECT * FROM increment.events")
    for name in ("by_key", "runs"):
        connection.exec_driver_sql(
            f"DELETE FROM main.{name} WHERE block < (SELECT ifnull(min(block), 0) FROM main.blocks)"
        )
        connection.exec_driver_sql(f"INSERT INTO main.{name} SELECT * FROM increment.{name}")


def _newest_block(path: Path) -> int:
    engine = readable(str(path), has_record=False)
    try:
        with reading_errors(str(path)), engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT ifnull(max(block), -1) FROM blocks").scalar_one())
    finally:
        engine.dispose()


def _removals(connection: Connection, after: int, until: int) -> tuple[int, str]:
    """Return how often events were removed from the middle of a log, and which between two offsets.

    The number does not suffice: after a restore, other events may have been removed as often.
    """
    if file_version(connection) < LINEAGE_SINCE:
        return 0, ""
    found = connection.exec_driver_sql(
        "SELECT ifnull(group_concat(first || '-' || min(last, ?2)), '') FROM"
        " (SELECT first, last FROM removed WHERE first > ?1 AND first <= ?2 ORDER BY first)",
        (after, until),
    )
    return get_state(connection).removals, str(found.scalar_one())


def _removals_in(path: str | Path, after: int, until: int) -> tuple[int, str]:
    engine = readable(str(path), has_record=False)
    try:
        with reading_errors(str(path)), engine.connect() as connection:
            return _removals(connection, after, until)
    finally:
        engine.dispose()


def _count_missing(path: Path, first: int, last: int) -> int:
    engine = readable(str(path), has_record=False)
    try:
        with reading_errors(str(path)), engine.connect() as connection:
            return count_between(connection, first, last) if file_version(connection) >= LINEAGE_SINCE else 0
    finally:
        engine.dispose()


def _schema(connection: Connection) -> list[str]:
    return list(connection.exec_driver_sql(_SCHEMA).scalars())


def _schema_of(path: Path) -> list[str]:
    engine = readable(str(path), has_record=False)
    try:
        with reading_errors(str(path)), engine.connect() as connection:
            return _schema(connection)
    finally:
        engine.dispose()


@contextmanager
def _locked(file: Path, check: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a backup, so that two processes do not write it at once. Waits for the other one."""
    path = file.with_name(f".{file.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        except BlockingIOError:
            check()
            time.sleep(LOCK_WAIT_S)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)
