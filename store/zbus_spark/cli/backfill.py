"""`zbus pipeline backfill`: pass a range of a log through a function and publish its result once, under other keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zbus.cli.options import JsonOption
from zbus.cli.render.output import encode_json, note, write
from zbus.cli.render.values import counted, parse_position
from zbus_spark.jobs.backfill import backfill as fill
from zbus_spark.jobs.backfill import find

from .options import LOCAL, ColdOption, LogArgument, MasterOption
from .progress import working


def backfill(
    log: LogArgument,
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="Function from a DataFrame of events to key, payload[, headers]."
        ),
    ],
    key: Annotated[
        list[str], typer.Option("--key", metavar="EXPR", help="Read keys that match this expression; repeatable.")
    ],
    start: Annotated[
        Any,
        typer.Option(parser=parse_position, metavar="POSITION", help="First offset, ISO time, or age such as -10m."),
    ] = None,
    end: Annotated[
        Any,
        typer.Option(
            parser=parse_position, metavar="POSITION", help="Last offset, ISO time or age; default: the head."
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Publish to this log.", show_default="the same log")
    ] = None,
    cold: ColdOption = None,
    sink_id: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the backfill; default: derived from its arguments.")
    ] = None,
    master: MasterOption = LOCAL,
    json: JsonOption = False,
) -> None:
    """Pass a part of a log through your own function and publish its result under other keys, exactly once.

    Running it again publishes nothing: it is identified by the log, the function, the keys and the range.
    """
    find(function)  # before Spark starts
    with working(f"backfilling {log}", master) as spark:
        done = fill(spark, log, function, key=key, start=start, end=end, sink_id=sink_id, to=to, cold=cold)
    if json:
        write(encode_json(done._asdict()))
    elif done.done_before:
        note(f"nothing was published: an earlier run published {counted(done.events, 'event')} ({done.sink_id})")
    else:
        note(f"published {counted(done.events, 'event')} ({done.sink_id})")
