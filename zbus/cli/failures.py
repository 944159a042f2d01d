"""The one place that turns an error of a command into a line on stderr and an exit code.

The exit code is 2 for errors that the caller can fix in the call, and 1 for errors of the log or the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from zbus.errors import ConfigInvalid, EventInvalid, LogLocked, LogRequired, SchemaConflict, SchemaError, ZbusError
from zbus.util.renamed import renamed_to

from .renamed import OPTIONS, VALUES

ERROR, USAGE = 1, 2

# The root of typer's own errors, through a name that every version of typer has.
TyperError: type[Exception] = typer.BadParameter.__mro__[2]


@contextmanager
def locked_hint(advice: str) -> Iterator[None]:
    """Add what to do on the command line to a `LogLocked`, whose own advice is for programs."""
    try:
        yield
    except LogLocked as error:
        if type(error) is LogLocked:
            raise _LogLocked(error.path, error.pid, advice) from None
        raise


class _LogLocked(LogLocked):
    def __init__(self, path: str, pid: int, advice: str) -> None:
        super().__init__(path, pid)
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.path} is owned by process {self.pid}, and a log has one owner at a time: {self.advice}"


def describe(error: Exception) -> tuple[str, int]:
    """Return the line for stderr and the exit code for an error."""
    if isinstance(error, TyperError):
        return _usage(error), getattr(error, "exit_code", USAGE)
    if isinstance(error, ZbusError):
        notes = getattr(error, "__notes__", [])
        usage = isinstance(error, ConfigInvalid | EventInvalid | LogRequired | SchemaError)
        code = USAGE if usage and not isinstance(error, SchemaConflict) else ERROR
        return _one_line("; ".join([str(error), *notes])), code
    if isinstance(error, OSError):
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _one_line(reason or type(error).__name__), ERROR
    return _one_line(
        f"this is a bug in zbus: {type(error).__name__}: {error}; ZBUS_DEBUG=1 prints the traceback"
    ), ERROR


def _usage(error: Exception) -> str:
    message: str = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    if context is None:
        return _one_line(message).rstrip(".")
    option = getattr(error, "option_name", "")
    if new := OPTIONS.get(context.command_path, {}).get(option):
        message = f"No such option: {option}: {renamed_to(new)}"  # without typer's guesses at similar options
    text = _one_line(message).replace("Value error, ", "").rstrip(".")  # typer may validate with pydantic
    return f"{text}{_renamed_value(message, context.command_path)}; see: {context.command_path} --help"


def _renamed_value(message: str, command: str) -> str:
    """Return the hint for a retired value of an option that a usage error names, or an empty string."""
    for option, values in VALUES.get(command, {}).items():
        for old, new in values.items():
            if repr(option) in message and f"{old!r} is not" in message:
                return f"; {old} was {renamed_to(new)}"
    return ""


def _one_line(text: str) -> str:
    """Return the text without line breaks and control characters, which a path or a payload may contain."""
    return "".join(each if each.isprintable() else " " for each in " ".join(text.split()))
