"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .render.values import parse_start

LogOption = Annotated[
    Path | None,
    typer.Option("--log", envvar="ZBUS_LOG", metavar="PATH", help="The log: a SQLite file of zbus."),
]
TransportOption = Annotated[
    str | None,
    typer.Option("--transport", metavar="URL", help="Such as nats://127.0.0.1:4222; default: ZBUS_TRANSPORT."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
StartOption = Annotated[
    Any,
    typer.Option(
        "--from",
        parser=parse_start,
        metavar="START",
        help="Where to start: new, beginning, an offset, an ISO time, or an age such as -10m.",
    ),
]
CountOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="End after so many events.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="End after this time; exit code 1 if --count was not reached."),
]
