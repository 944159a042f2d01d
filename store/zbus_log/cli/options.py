"""The log argument of `zbus log`. The log must exist: inspecting a log never creates one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from zbus.errors import ConfigInvalid
from zbus_log.backup.new_log import log_path
from zbus_log.log import SqliteLog

CLOSE_S = 5.0


def _path(log: str) -> Path:
    """Return the path of a log that is given as a path or as a `sqlite://` URL."""
    return log_path(log.removeprefix("sqlite://"))


LogArgument = Annotated[
    Path,
    typer.Argument(
        parser=_path,
        envvar="ZBUS_LOG",
        metavar="LOG",
        help="Path or sqlite:// URL of the log, a SQLite file.",
        show_default=False,
    ),
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="EXPR", help="Only events whose key matches this expression. Repeatable."),
]


def _folder(text: str) -> str:
    return str(Path(text).expanduser())  # as in the setting `cold_dir`


ColdOption = Annotated[
    str | None,
    typer.Option(
        "--cold",
        parser=_folder,
        envvar="ZBUS_COLD_DIR",
        metavar="FOLDER",
        help="Folder of the cold tier of the log; default: LOG-cold.",
        show_default=False,
    ),
]


@contextmanager
def opened(log: Path, *, read_only: bool, accept_loss: bool = False, cold: str | None = None) -> Iterator[SqliteLog]:
    """Open the log for the duration of a command."""
    check_is_there(log)
    found = SqliteLog(str(log), read_only=read_only, accept_loss=accept_loss, cold=cold)
    try:
        yield found
    finally:
        found.close(CLOSE_S)


def check_is_there(log: Path) -> None:
    """Raise `ConfigInvalid` if the log does not exist. A log with only its head record exists, but is damaged."""
    if not log.is_file() and not Path(f"{log}-head").is_file():
        raise ConfigInvalid("log", f"there is no log {str(log)!r}")
