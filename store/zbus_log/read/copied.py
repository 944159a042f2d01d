"""Copies of a log in use: such a copy is usually torn, so all of it is read before it is used.

Everyone who opens a log checks this. An owner stores in the head record that the copy is complete. A reader cannot, so
a process remembers which copies it has read: one operation opens a log several times.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress

from zbus.errors import LogDamaged
from zbus.util.memo import Memo
from zbus_log.file.database import find_damage
from zbus_log.file.head_record import Head, copied_from, may_lack_newest, read_record

from .verify import verify_files

CHECKED_MAX = 100

_State = tuple[tuple[int, ...], ...]

_checked = Memo[_State, None](CHECKED_MAX)


def check_if_copied(path: str) -> None:
    """Raise `LogDamaged` if the log is a copy of one in use and is not complete.

    Reads all of it, once per process as long as its files do not change.
    """
    source = copied_from(path)
    if source is None:
        return
    state = _state(path)
    if state not in _checked:
        check_copy(path, source, read_record(path), may_lack_newest(path))
        _checked[state] = None


def check_copy(path: str, source: str, known: Head | None, power_was_cut: bool) -> None:
    """Read the whole log at `path`, a copy of `source`. Raises `LogDamaged` if it is not complete.

    The files of its cold tier never change and have checksums, so they are not read.
    """
    found = verify_files(path)
    problems = list(found.problems)
    if power_was_cut:  # the copy may lack the newest events, as the log itself may
        problems = [each for each in problems if "were acknowledged and are missing" not in each]
    problems += find_damage(f"{path}-cursors")
    if problems:
        source = shlex.quote(source)
        reason = (
            f"it is a copy of {source}, made while that was in use, and is not complete: {problems[0]}. Copy a log "
            f"in use with: zbus log backup {source} FILE"
        )
        is_short = known is not None and 0 < found.head < known.head
        raise LogDamaged(path, reason, (found.head + 1, known.head) if known and is_short else None)


def _state(path: str) -> _State:
    """Return which files the log consists of now. A reader creates an empty write-ahead log."""
    found: list[tuple[int, ...]] = []
    for side in ("", "-wal", "-head", "-cursors", "-cursors-wal"):
        with suppress(OSError):
            stat = os.stat(f"{path}{side}")  # noqa: PTH116
            if stat.st_size:
                found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
