"""`zbus sim`: the group of the simulator's commands."""

from __future__ import annotations

from zbus.cli.apps import new_app

from .routes import routes
from .run import run

app = new_app("Run scenarios in a simulated world: the production code on a simulated network, disk and clock.")
app.command()(run)
app.command()(routes)
