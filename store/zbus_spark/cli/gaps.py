"""`zbus pipeline gaps`: missing, late and duplicate events of each publisher in a log."""

from __future__ import annotations

from pathlib import Path

import typer
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from zbus.cli.failures import ERROR
from zbus.cli.options import JsonOption
from zbus.cli.render.output import note
from zbus_log.cli.options import opened
from zbus_spark.jobs import gaps as find_gaps
from zbus_spark.jobs.gaps import COLUMNS, MISSING

from .options import (
    LOCAL,
    CheckOption,
    ColdOption,
    LogArgument,
    MasterOption,
    ShownOption,
    load,
    low_water_of,
    removed_by,
)
from .progress import working
from .tables import print_rows

SEQUENCES = "heard/"  # positions with the highest sequence of each publisher in beacons, plus one


def gaps(
    log: LogArgument,
    cold: ColdOption = None,
    check: CheckOption = False,
    rows: ShownOption = 50,
    json: JsonOption = False,
    master: MasterOption = LOCAL,
) -> None:
    """Find missing, late and duplicate events of each publisher.

    Sequences start at 0 and rise by 1. Events missing after the last one are known only from the beacons of other
    nodes, and events removed from the middle of the log only from its file, so only if the log is a file. Events that
    retention or a purge removed do not count as missing. Where the log does not know any more whose events it removed,
    a gap that is no larger than what was removed there is `maybe_removed`.
    """
    with working("finding gaps", master) as spark:
        low_water = low_water_of(log, cold)
        events = load(spark, log, COLUMNS, cold=cold)
        found = find_gaps(events, _highest_sequences(log), low_water, removed_by(log, cold)).persist()
        counts = {
            row["finding"]: row["events"]
            for row in found.groupBy("finding").agg(F.sum("events").alias("events")).collect()
        }
        print_rows(found, json, rows, "gaps")
        found.unpersist()
    missing = sum(counts.get(name, 0) for name in MISSING)
    note(f"missing: {missing:,}, late: {counts.get('late', 0):,}, duplicate: {counts.get('duplicate', 0):,}")
    if low_water:
        note(f"events up to offset {low_water:,} were removed from this log and do not count as missing")
    if removed := counts.get("removed", 0):
        note(f"removed from the middle of this log: {removed:,}; they do not count as missing")
    if unknown := counts.get("maybe_removed", 0):
        note(
            f"removed from the middle of this log, or never stored: {unknown:,}; the log does not know any more which "
            "events it removed there, and they do not count as missing"
        )
    if check and missing:
        raise typer.Exit(ERROR)


def _highest_sequences(log: str) -> dict[int, int]:
    if "://" in log:
        return {}
    with opened(Path(log), read_only=True) as found:
        positions = found.positions.load()
    found_sequences = {
        name.removeprefix(SEQUENCES): number for name, number in positions.items() if name.startswith(SEQUENCES)
    }
    return {int(publisher, 16): number - 1 for publisher, number in found_sequences.items()}
