"""Building blocks of the command line: help texts without markup, and groups that are imported on first use."""

from __future__ import annotations

import pkgutil
from typing import Any

import typer
import typer.core
import typer.main

from zbus.util.renamed import renamed_to

from .renamed import COMMANDS

SENTENCE_LENGTH_MAX = 1000  # long enough for the first sentence of any command


class Group(typer.core.TyperGroup):
    """A group whose help lists each command with the complete first sentence of its help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that `args` names. Raises a usage error that names the new command if it was renamed."""
        if args and (new := COMMANDS.get(f"{ctx.command_path} {args[0]}")):
            ctx.fail(f"No such command {args[0]!r}: {renamed_to(new)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, command) for name, command in found if command is not None and not command.hidden]
        rows = [(name, command.get_short_help_str(SENTENCE_LENGTH_MAX)) for name, command in shown]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _LazyGroup(Group):
    """A group with the commands of another app, which is imported when they are listed or one is called."""

    load: str

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the other app's commands."""
        return list(self._commands().list_commands(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of the other app, or None."""
        return self._commands().get_command(ctx, cmd_name)

    def _commands(self) -> Any:
        return typer.main.get_command(pkgutil.resolve_name(self.load))


def new_app(help: str | None = None, cls: type[Group] = Group) -> typer.Typer:  # noqa: A002 - typer's own name
    """Create an app whose help is printed as written. Rich markup would read `[web]` as a style and drop it."""
    return typer.Typer(cls=cls, help=help, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)


def lazy_app(help: str, load: str) -> typer.Typer:  # noqa: A002 - typer's own name
    """Create an app with the commands of another app, such as "zbus_log.cli.schema:app".

    `zbus --help` shows `help` without importing that module and the libraries that it needs.
    """
    app = new_app(help, type("LazyGroup", (_LazyGroup,), {"load": load}))
    app.callback()(_nothing)  # typer requires a callback or a command
    return app


def _nothing() -> None:
    pass
