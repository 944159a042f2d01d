"""Verification of a backup, with the same checks as for a log."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from zbus_log.file.head_record import Head, HeadRecord
from zbus_log.read.verify import Report, verify

from .backup_file import COLD, NAME, file_of, read_info
from .cold_copy import decode, write_manifest
from .log_copy import Progress


def verify_backup(path: str, progress: Progress | None = None) -> Report:
    """Read a whole backup and report every problem. Changes nothing.

    A backup has no head record, so this is done through a link to it that has one, with the cut of the backup.
    """
    file = file_of(path)
    info = read_info(file)
    with tempfile.TemporaryDirectory(prefix="zbus-verify-") as place:
        link = Path(place) / NAME
        link.symlink_to(file.absolute())
        record = HeadRecord(str(link))
        record.update(Head(info.epoch, info.cut, info.cut, info.incarnation))
        record.close()
        problems = []
        manifest = decode(file.with_name(COLD), info.cold)
        if manifest.segments:
            tier = Path(place) / COLD
            for each in (each for segment in manifest.segments for each in segment.files):
                there = file.with_name(COLD) / each.path
                if not there.is_file():
                    problems.append(f"{there} is missing")
                    continue
                (tier / each.path).parent.mkdir(parents=True, exist_ok=True)
                (tier / each.path).symlink_to(there.absolute())
            write_manifest(manifest, tier)
        found = verify(os.fspath(link), progress)
    if found.head != info.cut and not found.problems:
        problems.append(f"the backup ends with offset {found.head}, but should end with {info.cut}")
    return found._replace(problems=[*problems, *found.problems])
