"""`zbus pipeline backfill`: a range of a log through a function, and back onto the bus under other keys, once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zbus.cli.options import JsonOption
from zbus.cli.render.output import encode_json, note, write
from zbus.cli.render.values import parse_position
from zbus_spark.jobs.backfill import backfill as fill
from zbus_spark.jobs.backfill import find

from .options import LOCAL, ColdOption, LogArgument, MasterOption
from .progress import working


def backfill(
    log: LogArgument,
    function: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="From a DataFrame of events to key, payload[, headers].")
    ],
    key: Annotated[list[str], typer.Option("--key", metavar="EXPR", help="What to read; may be given several times.")],
    start: Annotated[
        Any, typer.Option(parser=parse_position, metavar="POSITION", help="The first offset, ISO time, or age: -10m.")
    ] = None,
    end: Annotated[
        Any, typer.Option(parser=parse_position, metavar="POSITION", help="The last one; default: the head of now.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Publish to this log.", show_default="the same")
    ] = None,
    cold: ColdOption = None,
    sink_id: Annotated[
        str | None, typer.Option(metavar="NAME", help="Known by this name rather than by what it does.")
    ] = None,
    master: MasterOption = LOCAL,
    json: JsonOption = False,
) -> None:
    """Replay a part of a log through a function of yours, and publish what it makes under other keys, exactly once.

    Run again, it publishes nothing twice: it is known by the log, the function, the keys and the range.
    """
    find(function)  # before Spark starts
    with working(f"backfilling {log}", master) as spark:
        done = fill(spark, log, function, key=key, start=start, end=end, sink_id=sink_id, to=to, cold=cold)
    if json:
        write(encode_json(done._asdict()))
    elif done.done_before:
        note(f"nothing was published: {done.events:,} events were, when this was done before ({done.sink_id})")
    else:
        note(f"published {done.events:,} events ({done.sink_id})")
