"""The commands of `zbus pipeline`."""

from __future__ import annotations

from zbus.cli.apps import new_app

from .backfill import backfill
from .coverage import coverage
from .demo import demo
from .gaps import gaps
from .offload import offload, trim
from .rollup import rollup
from .run import run
from .sessions import sessions

__all__ = ["app"]

app = new_app()
for command in (rollup, gaps, coverage, sessions, offload, trim, backfill, run, demo):
    app.command()(command)
