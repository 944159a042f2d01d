"""The root command: its own commands, those of other packages, and the error handling that all of them share."""

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
from zbus.plugins import missing

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
from .sim.command import app as sim
from .sub import sub
from .top.command import top

COMMANDS = "zbus.commands"  # entry-point group; each entry point is the name of a command and its typer app
EXTRAS = {"pipeline": "spark", "serve": "web", "broker": "zmq"}  # the extra that installs the libraries of a command


class Commands(Group):
    """A group that also finds the commands of other packages, which import their libraries only when called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the core's commands, then those of other packages."""
        own = super().list_commands(ctx)
        return own + sorted(_others().keys() - set(own))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command of the core, or one that an entry point provides."""
        own = super().get_command(ctx, cmd_name)
        other = _others().get(cmd_name)
        return own if own is not None or other is None else _load(other)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises `ConfigInvalid` if a library of another package's command is not installed."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if ctx.invoked_subcommand not in _others() or (error.name or "").startswith("zbus"):  # a bug of zbus
                raise
            raise _not_installed(ctx.invoked_subcommand, error) from error


class LoggingFormat(StrEnum):
    """Format of log records."""

    text = "text"
    json = "json"


class LoggingLevel(StrEnum):
    """Minimum level of log records."""

    debug = "debug"
    info = "info"
    warning = "warning"


app = new_app(
    "An event bus with a durable log. Data goes to stdout, messages go to stderr. Exit codes: 0, 1 (error), 2 (usage).",
    cls=Commands,
)
for command in (pub, sub, monitor, top, bridge, router, nodes, demo, bench, doctor):
    app.command()(command)
app.add_typer(sim, name="sim")


def _print_version(requested: bool) -> None:
    if requested:
        write(f"zbus {zbus.__version__}\n".encode())
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
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
    """Run the command line and exit the process. An error is one line on stderr, never a traceback."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="zbus", standalone_mode=False)
    except typer.Abort:
        note("zbus: aborted; nothing was changed")
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
    return ConfigInvalid(name, f"it {missing(error, EXTRAS.get(name))}")


def _stand_in(error: ConfigInvalid) -> typer.Typer:
    """Return an app for a command that cannot be imported. Its help and its error name the missing library."""
    app = new_app()

    @app.command(
        help=f"Not installed: {error.reason}.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def stand_in() -> None:
        raise error

    return app
