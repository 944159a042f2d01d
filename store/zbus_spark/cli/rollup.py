"""`zbus pipeline rollup`: each key, window by window, as a table, as files, as a report, or as it goes on."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from pyspark.sql import DataFrame

from zbus.cli.options import JsonOption
from zbus.cli.render.output import note, show, write
from zbus.errors import ConfigInvalid
from zbus_spark.jobs import rollup as roll_up
from zbus_spark.jobs.atomic_parquet import parquet as filed
from zbus_spark.jobs.durations import milliseconds
from zbus_spark.jobs.report import write_report
from zbus_spark.jobs.rollup import LATENCY_HEADER, columns, totals

from .follow import follow_stream
from .options import (
    LOCAL,
    AfterOption,
    ColdOption,
    KeyOption,
    LogArgument,
    MasterOption,
    ShownOption,
    UntilOption,
    load,
    load_stream,
)
from .progress import working
from .tables import as_line, as_table, print_rows


def rollup(
    log: LogArgument,
    window: Annotated[str, typer.Option(metavar="DURATION", help="How long a window is.")] = "1 minute",
    key: KeyOption = None,
    after: AfterOption = None,
    until: UntilOption = None,
    cold: ColdOption = None,
    latency_header: Annotated[
        str, typer.Option(metavar="NAME", help="The header with the Unix nanoseconds from which latency counts.")
    ] = LATENCY_HEADER,
    parquet: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write every window as Parquet.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with charts.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as the log grows: windows as they end.")
    ] = False,
    watermark: Annotated[
        str, typer.Option(metavar="DURATION", help="With --follow: how late an event may be and still count.")
    ] = "1 minute",
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --follow: remember how far it came, and go on there.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="With --follow: end when all that is there was read.")] = False,
    rows: ShownOption = 20,
    json: JsonOption = False,
    master: MasterOption = LOCAL,
) -> None:
    """Count events and bytes of each key in each window, with rates and p50 and p99 of the end-to-end latency.

    Latency is the time from the moment that the producer wrote into a header up to the moment of publishing; events
    without that header have none. The table has a row for each key, --json and --parquet one for each key and window.
    With --follow a window is printed once no more events can come for it, until Ctrl-C.
    """
    for name, text in (("window", window), ("watermark", watermark)):
        milliseconds(name, text)
    if follow:
        if html is not None or until is not None:
            raise ConfigInvalid("follow", "a stream has no end, so leave out --until and --html")
        with working("rolling up", master) as spark:
            events = load_stream(spark, log, columns(latency_header), key, after)
            rolled = roll_up(events, window, latency_header, watermark)
            late = follow_stream(
                rolled, lambda batch, number: _finished(batch, number, json, parquet), checkpoint, once
            )
        if late:
            note(f"in all, {late:,} times a window lacks events that came later than its watermark ({watermark})")
        return
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigInvalid("html", f"there is no folder {str(html.absolute().parent)!r}")
    if once or checkpoint is not None:
        raise ConfigInvalid("once" if once else "checkpoint", "it goes with --follow")
    with working("rolling up", master) as spark:
        events = load(spark, log, columns(latency_header), key, after, until, cold)
        rolled = roll_up(events, window, latency_header).persist()
        with filed(rolled, str(parquet.absolute())) if parquet is not None else nullcontext():
            if html is not None:
                write_report(html, log, events, rolled, window, latency_header)
        print_rows(rolled.orderBy("start", "key") if json else totals(rolled), json, rows, "rollup")
        rolled.unpersist()
    for written in filter(None, (parquet, html)):
        note(f"written: {written}")


def _finished(batch: DataFrame, number: int, json: bool, parquet: Path | None) -> None:
    """Windows that ended. Files of a batch replace those that it left when it was cut short."""
    # Worked out once: Spark counts what a watermark leaves out each time that it works out a batch, and sorting is one.
    batch.persist()
    try:
        if parquet is not None:
            with filed(batch, str(parquet.absolute() / f"batch={number}"), replace=True):
                pass
        found = batch.orderBy("start", "key").collect()
    finally:
        batch.unpersist()
    if json:
        write(b"".join(map(as_line, found)))
    elif found:
        show(as_table(batch.columns, found, f"windows that ended, up to {found[-1]['end']:%Y-%m-%d %H:%M:%S} UTC"))
