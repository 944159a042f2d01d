"""`zbus log verify`: read the whole log and list its problems, or accept the loss of missing offsets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zbus.cli.failures import ERROR
from zbus.cli.render.output import note, progress, write
from zbus.cli.render.values import counted
from zbus.errors import ZbusError
from zbus_log.backup.backup_file import file_of, find_info
from zbus_log.backup.check import verify_backup
from zbus_log.read.verify import verify as check

from .options import ColdOption, LogArgument, check_is_there, opened


def verify(
    log: LogArgument,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="First open a damaged log and accept its loss: missing offsets are never used again."
        ),
    ] = False,
    cold: ColdOption = None,
) -> None:
    """Check every event, offset and checksum of a log or backup. Prints each problem. Exits with 1 if it finds any."""
    log = file_of(str(log))
    check_is_there(log)
    if accept_loss:
        with opened(log, read_only=False, accept_loss=True, cold=cold) as found:
            note(f"{log} is usable again; its head is {found.head()}")
    with progress("offsets") as bar:
        task = bar.add_task("verifying", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        report = verify_backup(str(log), show) if _is_backup(log) else check(str(log), show, cold)
    for first, last in report.losses:
        note(f"offsets {first} to {last} were lost, and the loss was accepted")
    for warning in report.warnings:
        note(f"zbus: {warning}")
    for problem in report.problems:
        write(f"{problem}\n".encode(errors="backslashreplace"))
    if report.problems:
        note(f"zbus: {log}: problems found: {len(report.problems)}")
        raise typer.Exit(ERROR)
    removed = f", {report.removed:,} removed" if report.removed else ""
    note(f"{log}: {counted(report.events, 'event')} up to offset {report.head:,}{removed}, no problems")


def _is_backup(path: Path) -> bool:
    try:
        return find_info(path) is not None
    except ZbusError:
        return False  # it is verified as a log, which reports what is wrong with it
