"""`zbus pipeline coverage`: compare two logs, such as a publisher's log and a sink's, or the logs of two zones."""

from __future__ import annotations

from typing import Annotated

import typer

from zbus.cli.failures import ERROR
from zbus.cli.options import JsonOption
from zbus.cli.render.output import note
from zbus_spark.jobs import coverage as compare
from zbus_spark.jobs.coverage import COLUMNS, DIFFERENCES

from .options import (
    LOCAL,
    AfterOption,
    KeyOption,
    LogArgument,
    MasterOption,
    ShownOption,
    UntilOption,
    load,
    removed_by,
)
from .progress import working
from .tables import print_rows

REMOVED = (("first", "removed_left"), ("second", "removed_right"))


def coverage(
    left: LogArgument,
    right: Annotated[str, typer.Argument(metavar="LOG", help="The log to compare it with: a file or a node.")],
    key: KeyOption = None,
    after: AfterOption = None,
    until: UntilOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if the logs differ by more than removed events.")
    ] = False,
    rows: ShownOption = 50,
    json: JsonOption = False,
    master: MasterOption = LOCAL,
) -> None:
    """List events that only one of two logs has, by identity, and events that differ between them.

    Digests of parts are compared first, then the events of the parts that differ. Offsets differ between logs, so give
    --after and --until as times. Events that a log in a file is known to have removed, by retention or a purge, are
    listed as removed. It knows them for `dedup_s` (7 days by default).
    """
    removed = removed_by(left), removed_by(right)
    with working("comparing", master) as spark:
        ours, theirs = (load(spark, log, COLUMNS, key, after, until) for log in (left, right))
        found = compare(ours, theirs, *removed).persist()
        counts = {row["finding"]: row["count"] for row in found.groupBy("finding").count().collect()}
        print_rows(found, json, rows, "coverage")
        found.unpersist()
    labels = (("only in the first", "left_only"), ("only in the second", "right_only"), ("different", "differs"))
    note(", ".join(f"{words}: {counts.get(name, 0):,}" for words, name in labels))
    gone = [f"{counts[name]:,} by the {side}" for side, name in REMOVED if name in counts]
    if gone:
        note(f"removed: {', '.join(gone)}; they do not count as a difference")
    if check and any(name in counts for name in DIFFERENCES):
        raise typer.Exit(ERROR)
