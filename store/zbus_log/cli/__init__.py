"""`zbus log`."""

import typer

app = typer.Typer()


@app.command()
def stats() -> None:
    """Stats."""


@app.command()
def tail() -> None:
    """Tail."""
