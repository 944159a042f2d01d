"""`zbus log prune`: remove the oldest events of a log now, by age, size, count or offset."""

from __future__ import annotations

from typing import Annotated

import typer

from zbus.cli.options import JsonOption, MaxAgeOption, MaxBytesOption
from zbus.cli.render.output import encode_json, note, progress, write
from zbus.cli.render.values import OFFSET_MAX, counted
from zbus.errors import ConfigInvalid
from zbus_log.client.proxied_writes import prune as prune_log
from zbus_log.retention import Rules

from .options import LogArgument, check_is_there


def prune(
    log: LogArgument,
    max_age: MaxAgeOption = None,
    max_bytes: MaxBytesOption = None,
    max_events: Annotated[
        int | None, typer.Option(min=0, max=OFFSET_MAX, metavar="N", help="Keep at most N events.")
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(
            min=0, max=OFFSET_MAX, metavar="OFFSET", help="Remove all events up to and including this offset."
        ),
    ] = None,
    ignore_cursors: Annotated[
        bool,
        typer.Option("--ignore-cursors", help="Also remove events that a durable subscription has not acknowledged."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove the oldest events. Prints how many were removed, and which durable subscription blocked further removal.

    If a running bus owns the log, that bus removes the events. A bus also prunes its log on its own if its settings
    retain_age_s, retain_bytes or retain_events are set.
    """
    rules = Rules(max_age, max_bytes, max_events, ignore_cursors, until)
    if not rules:
        raise ConfigInvalid("prune", "give at least one limit: --max-age, --max-bytes, --max-events or --until")
    check_is_there(log)
    with progress("events") as bar:
        task = bar.add_task("removing", total=None)
        trimmed = prune_log(log, rules, progress=lambda removed: bar.update(task, completed=removed))
    if json:
        write(encode_json(trimmed._asdict()))
        return
    note(f"removed {counted(trimmed.removed, 'event')}; the log now starts after offset {trimmed.low_water:,}")
    if trimmed.held_by is not None:
        note(f"durable {trimmed.held_by!r} has not acknowledged later events; --ignore-cursors removes them too")
