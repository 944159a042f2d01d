"""Confirmation of a command that changes or moves data."""

from __future__ import annotations

import os

import typer


def confirm(prompt: str, yes: bool) -> None:
    """Ask for confirmation on a terminal. A script confirms with --yes."""
    if yes:
        return
    if not os.isatty(0):
        raise typer.BadParameter("there is no terminal to ask for confirmation: give --yes", param_hint="--yes")
    typer.confirm(prompt, abort=True, err=True)
