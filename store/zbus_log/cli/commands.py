"""The commands of `zbus log`."""

from __future__ import annotations

from zbus.cli.apps import new_app

from .backup import backup, restore
from .cursors import cursors
from .fork import fork, promote
from .prune import prune
from .purge import purge
from .read import replay, tail
from .stats import stats
from .verify import verify

__all__ = ["app"]

app = new_app()
for command in (stats, tail, replay, verify, cursors, prune, purge, backup, restore, fork, promote):
    app.command()(command)
