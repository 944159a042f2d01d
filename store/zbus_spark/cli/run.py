"""`zbus pipeline run`: run a pipeline that a TOML file declares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zbus.cli.options import JsonOption
from zbus.cli.render.output import note
from zbus.cli.render.values import counted
from zbus_spark.jobs.pipeline_file import load
from zbus_spark.jobs.pipeline_file import run as run_declared

from .options import LOCAL, MasterOption
from .progress import working
from .tables import print_rows


def run(
    file: Annotated[
        Path, typer.Argument(metavar="PIPELINE.TOML", help="File with a source, steps in Spark SQL, and a sink.")
    ],
    master: MasterOption = LOCAL,
    json: JsonOption = False,
) -> None:
    """Run a declared pipeline: [source], [[steps]] and [sink] of a TOML file, checked before Spark starts.

    The source is the view `events`; each step is a view for the next steps. The sink is a log, a folder of Parquet, or
    a table on stdout. Events are published to a log exactly once, even if the file is run again.
    """
    loaded = load(file)
    sink = loaded.pipeline.sink
    with working(f"running {file}", master) as spark:
        ran = run_declared(spark, loaded)
        if ran.table is not None:
            print_rows(ran.table, json, sink.rows, str(file))
    if ran.done_before:
        advice = "change the file or its id to publish again"
        before = counted(ran.events or 0, "event")
        note(f"nothing was published: an earlier run of this file published {before}; {advice}")
    elif ran.events is not None:
        note(f"published {counted(ran.events, 'event')} to {sink.log}")
    elif sink.parquet is not None:
        note(f"wrote {sink.parquet}")
