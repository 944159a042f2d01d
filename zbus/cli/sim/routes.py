"""`zbus sim routes`: which event reaches which subscriber, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def routes(scenario: Annotated[Path, typer.Argument(help="TOML file with nodes, subscriptions and events.")]) -> None:
    """Show which event reaches which subscriber, and why or why not."""
    raise NotImplementedError
