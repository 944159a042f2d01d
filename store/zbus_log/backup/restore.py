"""Restores a backup as a log. The next owner that opens it begins a new incarnation, as every owner does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from zbus.deliver.start_position import to_ns
from zbus.errors import ConfigInvalid, LogDamaged
from zbus.ports.lineage import Lineage
from zbus_log.file.database import reading_errors, snapshot
from zbus_log.file.head_record import read_record
from zbus_log.file.incarnations import read_lineage
from zbus_log.file.tables import get_head, get_low_water
from zbus_log.read.reader import first_at, readable
from zbus_log.write.cursors import SqliteCursors

from . import cold_copy
from .backup_file import COLD, BackupInfo, file_of, read_info
from .log_copy import LogCopy, Progress
from .new_log import NewLog


class Restored(NamedTuple):
    """Result of a restore."""

    cut: int  # the last offset of the log; later events are missing here
    made_at_ns: int  # when the backup was made
    replaced: str | None  # the new path of the log that was there before
    replaced_head: int | None  # its last acknowledged offset


def restore(
    backup: str,
    log: str,
    *,
    at: int | datetime | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Restored:
    """Make the log `log` from a backup, up to the offset or time `at`, or all of it.

    Raises `ConfigInvalid` if there is a log already, unless `replace` is set: then it is moved aside.
    """
    file = file_of(backup)
    info = read_info(file)
    if Path(log).exists() and file.samefile(log):
        raise ConfigInvalid("log", f"{log!r} is the backup itself: give another path. Nothing was changed")
    with NewLog(log) as new:
        if not replace:
            new.check_free()
        copy = LogCopy(str(file), new.path, progress, of_backup=True)
        copied = copy.whole(bytes_max=None) if at is None else copy.rows(until=offset_at(str(file), at))
        manifest = cold_copy.until_cut(cold_copy.decode(file.with_name(COLD), info.cold), copied)
        if manifest is not None:
            place = Path(f"{new.path}-cold")
            cold_copy.copy_files(manifest, file.with_name(COLD), place)
            cold_copy.write_manifest(manifest, place)
        _restore_cursors(file, info, new.path, copied.cut)
        new.record_head(copied)
        before = _head_of(log)
        replaced = new.put_in_place(replace=replace)
    return Restored(copied.cut, info.made_at, replaced, before if replaced is not None else None)


def offset_at(log: str, at: int | datetime) -> int:
    """Return the last offset before the first event that was published after a time; an offset is returned as it is.

    Raises `ConfigInvalid` if the log does not have the events before that time any more.
    """
    if isinstance(at, int):
        return at
    engine = readable(log, has_record=False)
    try:
        with reading_errors(log), engine.connect() as connection, snapshot(connection):
            head, low_water = get_head(connection), get_low_water(connection)
            found = first_at(connection, to_ns(at) + 1, head) - 1
    finally:
        engine.dispose()
    if 0 < low_water < head and found <= low_water:
        raise ConfigInvalid(
            "at",
            f"the file of the log has the offsets {low_water + 1} to {head}, and the first of them was published after "
            f"{at.isoformat()}: events up to that time were removed. Choose a later time, or an older backup",
        )
    return found


class _BackedUp:
    """The history that the cursors of a backup are about: that of the whole backup."""

    def __init__(self, lineage: Lineage, head: int, losses: Sequence[tuple[int, int]]) -> None:
        self.lineage, self._head, self._losses = lineage, head, losses

    def head(self) -> int:
        return self._head

    def is_lost(self, offset: int) -> bool:
        return any(first <= offset <= last for first, last in self._losses)


def _restore_cursors(file: Path, info: BackupInfo, log: str, cut: int) -> None:
    """Write the cursors beside a log. Those above the cut, which had acknowledged everything before it, move there.

    A cursor that could not be used with the backed up log stays where it is, and so cannot be used with this one.
    """
    if not info.cursors:
        return
    Path(f"{log}-cursors").write_bytes(info.cursors)
    if cut >= info.cut:
        return
    engine = readable(str(file), has_record=False)
    try:
        with reading_errors(str(file)), engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT first, last FROM losses").all()
            losses = [(int(first), int(last)) for first, last in found]
            history = _BackedUp(read_lineage(connection), info.cut, losses)
    finally:
        engine.dispose()
    cursors = SqliteCursors(log, history)
    try:
        for cursor in cursors.list():
            if cursor.offset > cut and cursors.problem(cursor) is None:
                cursors.reset(cursor.name, cut)
    finally:
        cursors.close(1.0)


def _head_of(log: str) -> int | None:
    try:
        record = read_record(log)
    except LogDamaged:
        return None
    return None if record is None else record.head
