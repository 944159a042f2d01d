"""The command's root: its own commands, those that other packages bring, and the one way in which all of them end."""

from __future__ import annotations

import os
import sys
import traceback
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, NoReturn

import typer
import typer.main

import zbus
from zbus.errors import ConfigInvalid

from .apps import Group, new_app
from .bench.command import bench
from .bridge import bridge
from .demo.command import demo
from .doctor import doctor
from .failures import describe
from .monitor.command import monitor
from .nodes import nodes
from .pub import pub
from .render.output import note, write
from .router import router
from .sub import sub
from .top.command import top

COMMANDS = "zbus.commands"  # the entry-point group: a name and a typer app
EXTRAS = {"pipeline": "spark", "serve": "web", "broker": "zmq"}  # what is installed with a command's libraries


class Commands(Group):
    """A group that also finds the commands of other packages. They import their libraries when they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Our own first, then the others."""
        own = super().list_commands(ctx)
        return own + sorted(_others().keys() - set(own))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of our own, or one that is found by its entry point."""
        own = super().get_command(ctx, cmd_name)
        other = _others().get(cmd_name)
        return own if own is not None or other is None else _load(other)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises `ConfigInvalid` if a library of another package's command is not installed."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if ctx.invoked_subcommand not in _others() or (error.name or "").startswith("zbus"):  # a bug
                raise
            raise _not_installed(ctx.invoked_subcommand, error) from error


class LoggingFormat(StrEnum):
    """How records are written."""

    text = "text"
    json = "json"


class LoggingLevel(StrEnum):
    """How much is written."""

    debug = "debug"
    info = "info"
    warning = "warning"


app = new_app(
    "An event bus with a durable log. Data goes to stdout, prose to stderr; exit codes: 0, 1 (error), 2 (usage).",
    cls=Commands,
)
for command in (pub, sub, monitor, top, bridge, router, nodes, demo, bench, doctor):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        write(f"zbus {zbus.__version__}\n".encode())
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
    logging: Annotated[
        LoggingFormat | None, typer.Option(help="Write log records to stderr, as text or as JSON lines.")
    ] = None,
    logging_level: Annotated[
        LoggingLevel, typer.Option(help="Minimum level to write. debug includes one record per burst of events.")
    ] = LoggingLevel.info,
) -> None:
    """Process the root options before any subcommand."""
    if logging is not None:
        zbus.configure_logging(logging.value, level=logging_level.value)


def main() -> NoReturn:
    """Run the command line, and end the process: errors as one line on stderr, never a traceback."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="zbus", standalone_mode=False)
    except typer.Abort:
        note("zbus: nothing was done")
        return 1
    except Exception as error:
        if os.environ.get("ZBUS_DEBUG"):
            traceback.print_exception(error)
        line, code = describe(error)
        note(f"zbus: {line}")
    return int(code or 0)


def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=COMMANDS)}


def _load(point: EntryPoint) -> Any:
    try:
        found = point.load()
    except ImportError as error:
        found = _stand_in(_not_installed(point.name, error))
    command = typer.main.get_command(found)
    command.name = point.name
    return command


def _not_installed(name: str, error: ImportError) -> ConfigInvalid:
    missing = error.name.partition(".")[0] if error.name else str(error)
    extra = EXTRAS.get(name)
    how = f"pip install 'zbus-mesh[{extra}]'" if extra else "zbus doctor prints the line that installs it"
    return ConfigInvalid(name, f"it needs {missing}, which is missing: {how}")


def _stand_in(error: ConfigInvalid) -> typer.Typer:
    """A command that cannot even be imported: it is still listed, and its help and its error say what is missing."""
    app = new_app()

    @app.command(
        help=f"Not installed: {error.reason}.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def stand_in() -> None:
        raise error

    return app
