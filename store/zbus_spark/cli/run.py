"""`zbus pipeline run`: a pipeline that is declared in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zbus.cli.options import JsonOption
from zbus.cli.render.output import note
from zbus_spark.jobs.pipeline_file import load
from zbus_spark.jobs.pipeline_file import run as run_declared

from .options import LOCAL, MasterOption
from .progress import working
from .tables import print_rows


def run(
    file: Annotated[Path, typer.Argument(metavar="PIPELINE.TOML", help="Source, steps in Spark SQL, and sink.")],
    master: MasterOption = LOCAL,
    json: JsonOption = False,
) -> None:
    """Run a declared pipeline: [source], [[steps]] and [sink] of a TOML file, checked before Spark starts.

    The source is the view `events`, each step a view for the next ones. The sink is a log, a folder of Parquet, or a
    table here. What goes to a log is published once, also if the file is run again.
    """
    loaded = load(file)
    sink = loaded.pipeline.sink
    with working(f"running {file}", master) as spark:
        ran = run_declared(spark, loaded)
        if ran.table is not None:
            print_rows(ran.table, json, sink.rows, str(file))
    if ran.done_before:
        note(f"nothing was published: {ran.events:,} events were, when this file was run before; change it, or its id")
    elif ran.events is not None:
        note(f"published {ran.events:,} events to {sink.log}")
    elif sink.parquet is not None:
        note(f"wrote {sink.parquet}")
