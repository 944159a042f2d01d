"""`zbus pipeline offload` and `zbus pipeline trim`: copy old events to Parquet files, then remove them from the log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zbus.cli.options import JsonOption
from zbus.cli.render.output import encode_json, note, write
from zbus.cli.render.values import OFFSET_MAX, counted, parse_age
from zbus_log import Pruned
from zbus_log.cli.options import LogArgument, check_is_there
from zbus_spark.jobs.offload import offload as offload_sealed
from zbus_spark.jobs.trim import trim as trim_offloaded

from .options import LOCAL, ColdOption, MasterOption
from .progress import working


def offload(
    log: LogArgument,
    cold: ColdOption = None,
    max_events: Annotated[
        int, typer.Option(min=0, max=OFFSET_MAX // 2, metavar="N", help="Do not offload the newest N events.")
    ] = 0,
    max_age: Annotated[
        Any,
        typer.Option(
            parser=parse_age, metavar="AGE", help="Do not offload events younger than AGE, such as 12h or 7d."
        ),
    ] = None,
    segment_events: Annotated[int, typer.Option(metavar="N", help="Maximum number of events in a segment.")] = 262_144,
    trim: Annotated[bool, typer.Option("--trim", help="Then remove offloaded events from the log.")] = False,
    master: MasterOption = LOCAL,
    json: JsonOption = False,
) -> None:
    """Copy the sealed part of a log to Parquet files by date and namespace. Replays read it from there too.

    Files are compared with the log before they count. If it is stopped at any point, run it again: no event is lost or
    duplicated.
    """
    check_is_there(log)
    with working(f"offloading {log}", master) as spark:
        done = offload_sealed(
            spark, log, cold=cold, segment_events=segment_events, max_events=max_events, max_age_s=max_age
        )
    trimmed = trim_offloaded(log, cold) if trim and Path(cold or f"{log}-cold").is_dir() else None
    if json:
        write(encode_json(done._asdict() | ({"trimmed": trimmed._asdict()} if trimmed is not None else {})))
        return
    if done.segments:
        range_ = f"from offset {done.first:,} to {done.last:,}: {counted(done.segments, 'segment')}"
        note(f"offloaded {counted(done.events, 'event')} {range_}, {done.bytes:,} bytes")
    else:
        note("nothing to offload: the tier already has all sealed events")
    if trimmed is not None:
        _report(trimmed)


def trim(log: LogArgument, cold: ColdOption = None, json: JsonOption = False) -> None:
    """Check the cold tier of a log, then remove its events from the log. Replays read them from the tier.

    Events that a durable subscription has not acknowledged are kept. If a running bus owns the log, it removes them.
    """
    check_is_there(log)
    trimmed = trim_offloaded(log, cold)
    if json:
        write(encode_json(trimmed._asdict()))
    else:
        _report(trimmed)


def _report(trimmed: Pruned) -> None:
    note(f"trimmed {counted(trimmed.removed, 'event')}; the log's file begins after offset {trimmed.low_water:,}")
    if trimmed.held_by is not None:
        note(f"later events are kept: the durable subscription {trimmed.held_by!r} has not acknowledged them")
