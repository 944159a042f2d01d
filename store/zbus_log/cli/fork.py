"""`zbus log fork` and `zbus log promote`: a copy of a log for rehearsals, and the end of one."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from zbus.cli.failures import locked_hint
from zbus.cli.options import JsonOption
from zbus.cli.render.output import encode_json, note, progress, write
from zbus_log.backup.fork import fork as fork_log
from zbus_log.backup.fork import promote as promote_fork

from .backup import AtOption
from .confirm import confirm
from .options import ColdOption, LogArgument


def fork(
    log: Annotated[str, typer.Argument(metavar="LOG|BACKUP", help="A log, which may be in use, or a backup of one.")],
    target: Annotated[str, typer.Argument(metavar="FORK", help="Path of the new log.")],
    at: AtOption = None,
    cold: ColdOption = None,
    json: JsonOption = False,
) -> None:
    """Make a copy of a log that is another log, to rehearse: run new handlers over old events, notifying no other node.

    The fork has its own log id and no durable subscriptions, so handlers start at the beginning. It cannot be opened
    with a transport, unless it is promoted.
    """
    with progress("events") as bar:
        task = bar.add_task("copying", total=None)
        made = fork_log(
            log.removeprefix("sqlite://"),
            os.fspath(target),
            at=at,
            cold=cold,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json:
        write(encode_json(made._asdict() | {"log_id": f"{made.log_id:x}"}))
        return
    note(f"{target} is a fork of {log} up to offset {made.cut:,}; it cannot be opened with a transport")


def promote(
    log: LogArgument, yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False
) -> None:
    """Turn a fork into an ordinary log, which may be opened with a transport. It keeps its own log id."""
    confirm(f"Let {log} be opened with a transport, which sends its new events to other nodes?", yes)
    with locked_hint("stop it first"):
        promote_fork(str(log))
    note(f"{log} is an ordinary log now")
