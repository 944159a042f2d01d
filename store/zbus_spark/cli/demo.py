"""`zbus pipeline demo`: create the log of a shop, run the jobs on it, and write an HTML report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pyspark.sql import SparkSession

from zbus.cli.render.output import note, progress, write
from zbus.errors import ConfigInvalid
from zbus.ports.log import Row
from zbus_log import put
from zbus_spark.jobs import gaps as find_gaps
from zbus_spark.jobs import rollup as roll_up
from zbus_spark.jobs.gaps import COLUMNS as GAPS_COLUMNS
from zbus_spark.jobs.offload import offload
from zbus_spark.jobs.report import write_report
from zbus_spark.jobs.rollup import columns as rollup_columns
from zbus_spark.jobs.rollup import totals

from .options import LOCAL, MasterOption, load
from .progress import working
from .shop import HOUR_NS, rows
from .tables import print_rows

SEGMENT_EVENTS = 65_536


def demo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the log and the report.")] = Path(
        "zbus-pipeline-demo"
    ),
    events: Annotated[
        int, typer.Option(min=1, max=10_000_000, metavar="N", help="Number of events to create.")
    ] = 200_000,
    master: MasterOption = LOCAL,
) -> None:
    """Create a log with an hour of a shop, roll it up, find gaps, offload it, and write an HTML report.

    The folder must be new or empty. Some events are missing or late, so that the jobs find them.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigInvalid("folder", f"{str(folder)!r} is not an empty folder: name another one, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    log, html = folder / "shop.db", folder / "rollup.html"
    with _timed(f"{events:,} events published"), progress("events") as bar:
        task = bar.add_task("publishing", total=events)
        put(log, _reported(rows(events, time.time_ns() - HOUR_NS), lambda more: bar.advance(task, more)))
    with working("starting", master) as spark:
        _roll_up(spark, log, html)
        with _timed("gaps"):
            print_rows(find_gaps(load(spark, str(log), GAPS_COLUMNS)), json=False, rows=20, title="gaps")
        with _timed("offload"):
            done = offload(spark, log, segment_events=SEGMENT_EVENTS)
    write(f"offloaded {done.events:,} events to {log}-cold, {done.bytes:,} bytes of Parquet\n".encode())
    write(f"report: {html}\n".encode())


def _roll_up(spark: SparkSession, log: Path, html: Path) -> None:
    with _timed("rollup and report"):
        events = load(spark, str(log), rollup_columns())
        rolled = roll_up(events).persist()
        print_rows(totals(rolled), json=False, rows=20, title="rollup")
        write_report(html, str(log), events, rolled, "1 minute")
        rolled.unpersist()


def _reported(chunks: Iterator[list[Row]], report: Callable[[int], None]) -> Iterator[list[Row]]:
    for chunk in chunks:
        yield chunk
        report(len(chunk))


@contextmanager
def _timed(what: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    note(f"{time.perf_counter() - begun:5.1f} s  {what}")
