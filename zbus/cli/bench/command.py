"""`zbus bench`: a quick measurement of this machine. The comparisons with other systems are in `benchmarks/`."""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import zbus
from zbus.cli.loop import run
from zbus.cli.options import JsonOption
from zbus.cli.render.output import encode_json, progress, show, write

from . import measure

MEASUREMENTS = (measure.many_publishers, measure.one_publisher, measure.batches, measure.no_log, measure.replay)
LABELS = {
    "durable_publishes_per_s": ("durable publishes, 256 awaiting publishers", "{:,.0f} /s"),
    "awaited_publish_us_p50": ("durable publish, one awaiting publisher, p50", "{:,.0f} µs"),
    "awaited_publish_us_p99": ("durable publish, one awaiting publisher, p99", "{:,.0f} µs"),
    "publish_many_events_per_s": ("publish_many, durable", "{:,.0f} /s"),
    "delivered_without_log_per_s": ("publish to async for, without a log", "{:,.0f} /s"),
    "replayed_events_per_s": ("replay to Event objects", "{:,.0f} /s"),
}


def bench(
    folder: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="Create the temporary logs in this folder."),
    ] = Path(),
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, metavar="SECONDS", help="Total duration of the measurements.")
    ] = 10.0,
    json: JsonOption = False,
) -> None:
    """Measure this machine in about ten seconds: publishing, delivering and replaying events of 100 bytes."""
    results: measure.Results = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".zbus-bench-") as made, progress("measurements") as bar:
        for each in bar.track(MEASUREMENTS, description="measuring"):
            results |= run(each(Path(made), seconds / len(MEASUREMENTS)))
    machine: dict[str, Any] = {
        "zbus": zbus.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "payload_bytes": len(measure.PAYLOAD),
    }
    if json:
        write(encode_json({name: round(value, 1) for name, value in results.items()} | machine))
        return
    table = Table("measurement", "result", title="zbus bench", title_justify="left")
    table.columns[1].justify = "right"
    for name, (label, form) in LABELS.items():
        table.add_row(label, form.format(results[name]))
    show(table)
