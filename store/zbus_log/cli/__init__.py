"""`zbus log`: look at a log, check it, and look after it. The core finds this by its entry point."""

from __future__ import annotations

import typer

from .cursors import cursors
from .read import replay, tail
from .retain import retain
from .stats import stats
from .verify import verify

__all__ = ["app"]

app = typer.Typer(help="Look at a log, check it, and look after it.", add_completion=False)
for command in (stats, tail, replay, verify, cursors, retain):
    app.command()(command)
