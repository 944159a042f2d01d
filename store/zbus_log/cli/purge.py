"""`zbus log purge`: remove all events of some keys from a log, whatever their age."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from zbus.cli.options import JsonOption
from zbus.cli.render.output import encode_json, note, progress, write
from zbus.cli.render.values import counted
from zbus.keys import KeySet
from zbus_log.client.proxied_writes import purge as purge_log
from zbus_log.purging import Preview, preview

from .confirm import confirm
from .options import LogArgument, check_is_there


def purge(
    log: LogArgument,
    key: Annotated[
        list[str], typer.Option("--key", metavar="EXPR", help="Remove events whose key matches. Repeatable.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Give the first confirmation.")] = False,
    key_again: Annotated[
        list[str] | None,
        typer.Option(
            "--key-again", metavar="EXPR", help="Give the second confirmation: each expression again. Repeatable."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Remove all events of some keys, whatever their age. This cannot be undone.

    Shows what would be removed and asks for confirmation, then asks for the expressions again. A script gives --yes
    and --key-again. Durable subscriptions that have not acknowledged some of the events are named, but do not prevent
    it. Events in the cold tier and in backups are not removed. If a running bus owns the log, that bus removes the
    events. `zbus log stats` lists the purges of a log.
    """
    keys = KeySet(key)
    check_is_there(log)
    found = preview(str(log), keys)
    _describe(found)
    if not found.events and not json:
        note("nothing was removed")
        return
    if found.events:
        confirm(f"Remove {counted(found.events, 'event')} for good?", yes)
        _confirm_again(keys, key_again)
    with progress("events") as bar:
        task = bar.add_task("removing", total=found.events)
        purged = purge_log(log, keys.expressions, progress=lambda removed: bar.update(task, completed=removed))
    if json:
        write(encode_json(purged._asdict()))
        return
    note(f"removed {counted(purged.removed, 'event')} up to offset {purged.until:,}")


def _describe(found: Preview) -> None:
    where = f" at the offsets {found.first:,} to {found.last:,}" if found.events else ""
    note(f"{counted(found.events, 'event')} in the log{where}")
    for name in found.unacknowledged:
        note(f"durable {name!r} has not acknowledged all of them, and will not receive them")
    if found.offloaded_until:
        note(f"the cold tier has the events up to offset {found.offloaded_until:,}: nothing is removed from it")


def _confirm_again(keys: KeySet, given: list[str] | None) -> None:
    """Ask for the expressions again. A script gives them with --key-again."""
    expressions = " ".join(keys.expressions)
    if given is None:
        if not os.isatty(0):
            reason = "there is no terminal to ask for the second confirmation: give --key-again"
            raise typer.BadParameter(reason, param_hint="--key-again")
        given = typer.prompt(f"Type the key expressions again, to remove them ({expressions})", err=True).split()
    if not given or set(KeySet(given).expressions) != set(keys.expressions):
        reason = f"it is not the same as --key ({expressions}). Nothing was removed"
        raise typer.BadParameter(reason, param_hint="--key-again")
