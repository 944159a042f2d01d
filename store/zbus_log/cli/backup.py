"""`zbus log backup` and `zbus log restore`: copies of a log that is in use, and logs that are made of them."""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Any

import typer

from zbus.cli.failures import ERROR, locked_hint
from zbus.cli.options import JsonOption
from zbus.cli.render.eventline import iso_time
from zbus.cli.render.output import encode_json, note, progress, write
from zbus.cli.render.values import counted, parse_position
from zbus.errors import ConfigInvalid
from zbus_log.backup.check import verify_backup
from zbus_log.backup.make import make_backup
from zbus_log.backup.new_log import NewLog
from zbus_log.backup.restore import restore as restore_log

from .confirm import confirm
from .options import ColdOption, LogArgument, check_is_there

NICE = 10  # lowers the priority of the process, so that the owner of the log comes first

AtOption = Annotated[
    Any,
    typer.Option(
        "--at",
        parser=parse_position,
        metavar="POSITION",
        help="Stop after this offset, or before the first event published after this ISO time or age such as -10m.",
    ),
]


def backup(
    log: LogArgument,
    target: Annotated[
        str, typer.Argument(metavar="FILE|FOLDER/", help="File of the backup; or a folder, which ends with a slash.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Then read the whole backup and check every event.")] = False,
    cold: ColdOption = None,
    json: JsonOption = False,
) -> None:
    """Back up a log, which may be in use: events, cursors, positions, schemas and the cold tier, up to one offset.

    If the target has a backup of this log, only the events since then are added. If it has one of another history, the
    command changes nothing and fails. A log with a cold tier needs a folder. If the command is interrupted, the last
    complete backup stays. Exits with 1 if --verify finds a problem.
    """
    check_is_there(log)
    os.nice(NICE)
    with progress("events") as bar:
        task = bar.add_task("copying", total=None)
        made = make_backup(
            str(log),
            target,
            cold=cold,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json:
        values = made._asdict() | {
            "log_id": f"{made.log_id:x}",
            "incarnation": f"{made.incarnation:x}",
            "digest": made.digest.hex(),
        }
        write(encode_json(values))
    else:
        events = counted(made.added, "event")
        what = f"full copy, {events}" if made.is_full else f"{events} added"
        note(f"{target}: {what}; the backup ends with offset {made.cut:,}")
    if verify:
        _verify(made.path)


def restore(
    source: Annotated[str, typer.Argument(metavar="FILE|FOLDER", help="A backup that zbus log backup made.")],
    log: LogArgument,
    at: AtOption = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Move an existing log aside, with all its files, under a new name.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: JsonOption = False,
) -> None:
    """Make a log from a backup. Prints the offset after which events are missing.

    An existing log is only replaced with --replace, and is then moved aside, never removed. No process may use it
    then. The log begins a new incarnation when a bus opens it: other nodes notice that it was restored.
    """
    if replace and NewLog(str(log)).exists:
        confirm(f"Move {log} aside and restore {source} in its place?", yes)
    with progress("events") as bar, locked_hint("stop it first"):
        task = bar.add_task("restoring", total=None)
        try:
            made = restore_log(
                source,
                str(log),
                at=at,
                replace=replace,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        except ConfigInvalid as error:
            if error.field == "log" and not replace and NewLog(str(log)).exists:
                raise ConfigInvalid("log", f"{error.reason}. --replace moves it aside") from None
            raise
    if json:
        write(encode_json(made._asdict()))
        return
    if made.replaced is not None:
        note(f"the log that was there is now {made.replaced}")
        if (made.replaced_head or 0) > made.cut:
            after = shlex.quote(made.replaced)
            note(f"its events after {made.cut:,} are not in {log}: zbus log replay {after} --after {made.cut}")
    note(
        f"{log} ends with offset {made.cut:,}, from a backup of {iso_time(made.made_at_ns)}; "
        "events that were stored after that offset are missing here"
    )


def _verify(path: str) -> None:
    with progress("offsets") as bar:
        task = bar.add_task("verifying", total=None)
        report = verify_backup(path, lambda done, total: bar.update(task, completed=done, total=total))
    for problem in report.problems:
        write(f"{problem}\n".encode(errors="backslashreplace"))
    if report.problems:
        note(f"zbus: {path}: problems found: {len(report.problems)}")
        raise typer.Exit(ERROR)
    note(f"{path}: {counted(report.events, 'event')} up to offset {report.head:,}, no problems")
