"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .render.values import parse_age, parse_size, parse_start

LogOption = Annotated[
    str | None,
    typer.Option(
        "--log",
        envvar="ZBUS_LOG",
        metavar="LOG",
        help="Path or URL of the log: a SQLite file, or the URL of a log of an installed plugin.",
    ),
]
TransportOption = Annotated[
    str | None,
    typer.Option(
        "--transport", metavar="URL", help="Transport URL, such as nats://127.0.0.1:4222. Default: ZBUS_TRANSPORT."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]
StartOption = Annotated[
    Any,
    typer.Option(
        "--from",
        parser=parse_start,
        metavar="START",
        help="Start at: new, beginning, an offset, an ISO time, or an age such as -10m.",
    ),
]
CountOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop after N events.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="Stop after this time. The exit code is 1 if --count was not reached."),
]
MaxAgeOption = Annotated[
    Any,
    typer.Option(
        "--max-age", parser=parse_age, metavar="AGE", help="Remove events older than this, such as 12h or 7d."
    ),
]
MaxBytesOption = Annotated[
    Any,
    typer.Option(
        "--max-bytes", parser=parse_size, metavar="SIZE", help="Keep the log file under this size, such as 200M or 1G."
    ),
]
ReportIntervalOption = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="Write a report every N seconds. 0 disables reports.")
]
