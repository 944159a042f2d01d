"""The log that a command of `zbus log` is about. It must be there: looking at a log never makes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from zbus.errors import ConfigInvalid
from zbus_log.log import SqliteLog

CLOSE_S = 5.0

LogArgument = Annotated[
    Path, typer.Argument(envvar="ZBUS_LOG", metavar="LOG", help="The log: a SQLite file of zbus.", show_default=False)
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="EXPR", help="Only keys that this expression matches; may be given several times."),
]


@contextmanager
def opened(log: Path, *, read_only: bool, accept_loss: bool = False) -> Iterator[SqliteLog]:
    """The log, open for the time of a command."""
    check_is_there(log)
    found = SqliteLog(str(log), read_only=read_only, accept_loss=accept_loss)
    try:
        yield found
    finally:
        found.close(CLOSE_S)


def check_is_there(log: Path) -> None:
    """A log whose file is gone, but not what is recorded beside it, is there too: damaged."""
    if not log.is_file() and not Path(f"{log}-head").is_file():
        raise ConfigInvalid("log", f"there is no log {str(log)!r}")
