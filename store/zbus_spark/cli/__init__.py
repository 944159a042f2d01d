"""`zbus pipeline`: Spark's jobs over a log. The core finds this by its entry point."""

from __future__ import annotations

import typer

from .backfill import backfill
from .coverage import coverage
from .demo import demo
from .gaps import gaps
from .offload import offload, trim
from .rollup import rollup
from .run import run
from .sessions import sessions

__all__ = ["app"]

app = typer.Typer(help="Work on a whole log with Spark: here by default, or on a cluster.", add_completion=False)
for command in (rollup, gaps, coverage, sessions, offload, trim, backfill, run, demo):
    app.command()(command)
