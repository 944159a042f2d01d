"""`zbus log cursors`: the durable names of a log, listed, moved, or forgotten."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.table import Table

from zbus.cli.options import JsonOption
from zbus.cli.render.eventline import iso_time
from zbus.cli.render.output import encode_json, note, show, write
from zbus.cli.render.values import OFFSET_MAX
from zbus.ports.log import Cursor
from zbus_log.log import SqliteLog

from .options import LogArgument, opened


def cursors(
    log: LogArgument,
    reset: Annotated[str | None, typer.Option(metavar="NAME", help="Move this durable name; needs --to.")] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="OFFSET", help="Where --reset moves it: beginning, end, or its last acknowledged offset."),
    ] = None,
    delete: Annotated[str | None, typer.Option(metavar="NAME", help="Forget this durable name.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    json: JsonOption = False,
) -> None:
    """List the durable names of a log and where they are; or move one, or forget one, that nobody uses."""
    if (reset is None) != (to is None):
        raise typer.BadParameter("--reset NAME and --to OFFSET go together", param_hint="--reset")
    if reset is not None and delete is not None:
        raise typer.BadParameter("--reset or --delete, not both", param_hint="--delete")
    with opened(log, read_only=True) as found:
        if reset is not None and to is not None:
            position = _position(found, to)
            _ask(f"Move durable {reset!r} to offset {position}?", yes)
            found.cursors.reset(reset, position)
            note(f"durable {reset!r} resumes after offset {position}")
        elif delete is not None:
            _ask(f"Forget durable {delete!r}, and where it was?", yes)
            found.cursors.delete(delete)
            note(f"durable {delete!r} is forgotten")
        else:
            head = found.head()
            listed = [as_json(cursor, head) for cursor in found.cursors.list()]
            if json:
                write(b"".join(map(encode_json, listed)))
            elif listed:
                show(_table(listed))
            else:
                note(f"{log} has no durable names")


def as_json(cursor: Cursor, head: int) -> dict[str, Any]:
    """A cursor as its line of JSON."""
    return {
        "name": cursor.name,
        "offset": cursor.offset,
        "behind": max(0, head - cursor.offset),
        "keys": list(cursor.keys),
        "updated_at": iso_time(cursor.updated_at_ns),
        "owner": cursor.owner,
    }


def _position(log: SqliteLog, text: str) -> int:
    head, low_water = log.head(), log.low_water()
    if text in ("beginning", "end"):
        return 0 if text == "beginning" else head
    if not (text.isascii() and text.isdigit() and int(text) <= OFFSET_MAX):
        raise typer.BadParameter(f"{text!r} is none of 'beginning', 'end', an offset", param_hint="--to")
    if int(text) > head or 0 < int(text) < low_water:
        raise typer.BadParameter(f"{text} is not between {low_water} and the head, {head}", param_hint="--to")
    return int(text)


def _ask(question: str, yes: bool) -> None:
    """On a terminal only: a script has said what it wants."""
    if not yes and os.isatty(0):
        typer.confirm(question, abort=True, err=True)


def _table(listed: list[dict[str, Any]]) -> Table:
    table = Table("durable", "offset", "behind", "keys", "updated", "read by process")
    for cursor in listed:
        numbers = f"{cursor['offset']:,}", f"{cursor['behind']:,}"
        owner = cursor["owner"] or "nobody"
        table.add_row(cursor["name"], *numbers, ", ".join(cursor["keys"]), cursor["updated_at"], owner)
    return table
