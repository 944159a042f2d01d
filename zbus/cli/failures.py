"""Every error that ends a command, as one line and an exit code; here and nowhere else.

2 is for what the caller can fix in the call, 1 for what is wrong with the log or the machine.
"""

from __future__ import annotations

import typer

from zbus.errors import ConfigInvalid, EventInvalid, LogRequired, SchemaConflict, SchemaError, ZbusError

ERROR, USAGE = 1, 2

# The root of typer's own errors, through a name that every version of typer has.
TyperError: type[Exception] = typer.BadParameter.__mro__[2]


def describe(error: Exception) -> tuple[str, int]:
    """The line for stderr and the exit code for an error."""
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
    return _one_line(f"this is a bug of zbus: {type(error).__name__}: {error}; ZBUS_DEBUG=1 shows where"), ERROR


def _usage(error: Exception) -> str:
    message: str = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    hint = f"; see: {context.command_path} --help" if context is not None else ""
    return _one_line(message).rstrip(".") + hint


def _one_line(text: str) -> str:
    """Without line breaks and control characters, whatever a path or a payload brought in."""
    return "".join(each if each.isprintable() else " " for each in " ".join(text.split()))
