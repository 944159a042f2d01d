"""Opening a log to read it, beside its owner or without one, or a transport to hear it. Reading never owns a log."""

from __future__ import annotations

from pathlib import Path

import typer

import zbus
from zbus.errors import ConfigInvalid


def open_to_read(log: Path) -> zbus.Bus:
    """A bus that only reads `log`; nothing of the environment makes it open a socket.

    Whoever looks at a log wants to see what is in it, also what no schema accepts.
    """
    return zbus.open(log, read_only=True, mode="embedded", listen=(), connect=(), check_schemas=False)


def open_to_hear(log: Path | None, transport: str | None) -> zbus.Bus:
    """A bus that reads `log`, or hears what other nodes publish on `transport` (or where `ZBUS_…` says)."""
    if log is not None and transport is not None:
        raise typer.BadParameter("read a log, or hear a transport: give one of them", param_hint="--transport")
    if log is not None:
        return open_to_read(log)
    bus = zbus.open(check_schemas=False, **({"transport": transport} if transport else {}))
    if bus.config.log is None and not bus.config.networked:
        reason = "without one there is nothing to read: give --log PATH (or ZBUS_LOG), or --transport URL"
        raise ConfigInvalid("log", reason)
    return bus
