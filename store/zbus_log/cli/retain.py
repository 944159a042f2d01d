"""`zbus log retain`: remove the oldest events of a log, by age, size, number or offset, now."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from zbus.cli.options import JsonOption
from zbus.cli.render.output import encode_json, note, progress, write
from zbus.cli.render.values import OFFSET_MAX, parse_age, parse_size
from zbus.errors import ConfigInvalid
from zbus_log.client.proxied_writes import retain as retain_in
from zbus_log.retention import Rules

from .options import LogArgument, check_is_there


def retain(
    log: LogArgument,
    age: Annotated[
        Any, typer.Option(parser=parse_age, metavar="AGE", help="Remove what is older, such as 12h or 7d.")
    ] = None,
    size: Annotated[
        Any, typer.Option("--bytes", parser=parse_size, metavar="SIZE", help="Keep the file under, such as 200M or 1G.")
    ] = None,
    events: Annotated[
        int | None, typer.Option(min=0, max=OFFSET_MAX, metavar="N", help="Keep so many events at most.")
    ] = None,
    upto: Annotated[
        int | None, typer.Option(min=0, max=OFFSET_MAX, metavar="OFFSET", help="Remove everything up to this offset.")
    ] = None,
    past_cursors: Annotated[
        bool, typer.Option("--past-cursors", help="Also remove what a durable name has not acknowledged yet.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove the oldest events, and say how many went and which durable name held others back.

    If a running bus owns the log, it is asked to do this. By itself it does the same by its settings retain_age_s
    and so on.
    """
    rules = Rules(age, size, events, past_cursors, upto)
    if not rules:
        raise ConfigInvalid("retain", "say what may stay: --age, --bytes, --events or --upto")
    check_is_there(log)
    with progress("events") as bar:
        task = bar.add_task("removing", total=None)
        trimmed = retain_in(log, rules, progress=lambda removed: bar.update(task, completed=removed))
    if json:
        write(encode_json(trimmed._asdict()))
        return
    note(f"removed {trimmed.removed:,} events; what is left starts after offset {trimmed.low_water:,}")
    if trimmed.held_by is not None:
        note(f"durable {trimmed.held_by!r} has not acknowledged more, and held it back; --past-cursors goes on")
