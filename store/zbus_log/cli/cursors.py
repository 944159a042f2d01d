"""`zbus log cursors`: list, move or delete the cursors of durable subscriptions."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from zbus.cli.options import JsonOption
from zbus.cli.render.eventline import iso_time
from zbus.cli.render.output import encode_json, note, show, write
from zbus.cli.render.values import OFFSET_MAX
from zbus.ports.log import Cursor
from zbus_log.log import SqliteLog

from .confirm import confirm
from .options import LogArgument, opened


def cursors(
    log: LogArgument,
    reset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Move the cursor of this durable subscription. Needs --to.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="OFFSET", help="New position for --reset: beginning, end, or the offset after which to resume."
        ),
    ] = None,
    delete: Annotated[
        str | None, typer.Option(metavar="NAME", help="Delete the cursor of this durable subscription.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: JsonOption = False,
) -> None:
    """List the durable subscriptions of a log and their positions; or move or delete one that is not in use."""
    if (reset is None) != (to is None):
        raise typer.BadParameter("--reset NAME and --to OFFSET go together", param_hint="--reset")
    if reset is not None and delete is not None:
        raise typer.BadParameter("--reset or --delete, not both", param_hint="--delete")
    with opened(log, read_only=True) as found:
        if reset is not None and to is not None:
            position = _position(found, to)
            confirm(f"Move durable {reset!r} to offset {position}?", yes)
            found.cursors.reset(reset, position)
            note(f"durable {reset!r} resumes after offset {position}")
        elif delete is not None:
            confirm(f"Delete durable {delete!r} and its position?", yes)
            found.cursors.delete(delete)
            note(f"durable {delete!r} was deleted")
        else:
            head = found.head()
            listed = [as_json(cursor, head, found.cursors.problem(cursor)) for cursor in found.cursors.list()]
            if json:
                write(b"".join(map(encode_json, listed)))
            elif listed:
                show(_table(listed))
                for cursor in listed:
                    if problem := cursor["problem"]:
                        note(f"zbus: durable {cursor['name']!r} cannot be used: {problem}. Move it with --reset")
            else:
                note(f"{log} has no durable subscriptions")


def as_json(cursor: Cursor, head: int, problem: str | None) -> dict[str, Any]:
    """Return the fields of a cursor for JSON. `problem` says why it cannot be used, if it cannot."""
    return {
        "name": cursor.name,
        "offset": cursor.offset,
        "behind": max(0, head - cursor.offset),
        "keys": list(cursor.keys),
        "updated_at": iso_time(cursor.updated_at_ns),
        "owner": cursor.owner,
        "problem": problem,
        "expired_at": None if cursor.expired_at_ns is None else iso_time(cursor.expired_at_ns),
    }


def _position(log: SqliteLog, text: str) -> int:
    head, low_water = log.head(), log.low_water()
    if text in ("beginning", "end"):
        return 0 if text == "beginning" else head
    if not (text.isascii() and text.isdigit() and int(text) <= OFFSET_MAX):
        raise typer.BadParameter(f"{text!r} must be 'beginning', 'end' or an offset", param_hint="--to")
    if int(text) > head or 0 < int(text) < low_water:
        raise typer.BadParameter(f"{text} is not between {low_water} and the head, {head}", param_hint="--to")
    return int(text)


def _table(listed: list[dict[str, Any]]) -> Table:
    table = Table("durable", "offset", "behind", "keys", "updated", "used by process")
    for cursor in listed:
        numbers = f"{cursor['offset']:,}", f"{cursor['behind']:,}"
        owner = "none, expired" if cursor["expired_at"] else cursor["owner"] or "none"
        owner = "cannot be used" if cursor["problem"] else owner
        table.add_row(cursor["name"], *numbers, ", ".join(cursor["keys"]), cursor["updated_at"], owner)
    return table
