"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LogOption = Annotated[
    Path | None,
    typer.Option("--log", envvar="ZBUS_LOG", metavar="PATH", help="The log: a SQLite file of zbus."),
]
TransportOption = Annotated[
    str | None,
    typer.Option("--transport", metavar="URL", help="Such as nats://127.0.0.1:4222; default: ZBUS_TRANSPORT."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
