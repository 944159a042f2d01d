"""`zbus pipeline rollup`: events of each key per window, as a table, as files, as a report, or continuously."""

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
    window: Annotated[str, typer.Option(metavar="DURATION", help="Length of a window.")] = "1 minute",
    key: KeyOption = None,
    after: AfterOption = None,
    until: UntilOption = None,
    cold: ColdOption = None,
    latency_header: Annotated[
        str, typer.Option(metavar="NAME", help="Header with the start of the latency, in Unix nanoseconds.")
    ] = LATENCY_HEADER,
    parquet: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write all windows as Parquet.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with charts.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log as it grows; print windows as they end.")
    ] = False,
    watermark: Annotated[
        str, typer.Option(metavar="DURATION", help="With --follow: how late an event may be to be counted.")
    ] = "1 minute",
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --follow: store the position here and resume from it.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="With --follow: stop when all events were read.")] = False,
    rows: ShownOption = 20,
    json: JsonOption = False,
    master: MasterOption = LOCAL,
) -> None:
    """Count events and bytes of each key in each window, with rates and p50 and p99 of the end-to-end latency.

    Latency is the time from the timestamp that the producer wrote into a header to publishing; events without that
    header have no latency. The table has a row for each key; --json and --parquet have one for each key and window.
    With --follow, a window is printed once it can get no more events, until Ctrl-C.
    """
    for name, text in (("window", window), ("watermark", watermark)):
        milliseconds(name, text)
    if follow:
        if html is not None or until is not None:
            raise ConfigInvalid("follow", "a stream has no end: omit --until and --html")
        with working("rolling up", master) as spark:
            events = load_stream(spark, log, columns(latency_header), key, after)
            rolled = roll_up(events, window, latency_header, watermark)
            late = follow_stream(
                rolled, lambda batch, number: _finished(batch, number, json, parquet), checkpoint, once
            )
        if late:
            note(f"dropped events of {late:,} windows in total: they were later than the watermark ({watermark})")
        return
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigInvalid("html", f"there is no folder {str(html.absolute().parent)!r}")
    if once or checkpoint is not None:
        raise ConfigInvalid("once" if once else "checkpoint", "this option needs --follow")
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
    """Print or write windows that ended. The files of a batch replace those of an interrupted attempt."""
    # Computed once: Spark counts dropped events each time that it computes a batch, and sorting computes it again.
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
        show(as_table(batch.columns, found, f"windows that ended up to {found[-1]['end']:%Y-%m-%d %H:%M:%S} UTC"))
