"""The buses that commands open: on a log, to read it without owning it, or on a transport, without a log.

The `ZBUS_…` variables in the environment are for the application. Each bus here takes only those that it needs.
"""

from __future__ import annotations

from pathlib import Path

import typer

import zbus
from zbus.errors import ConfigInvalid

READER_SETTINGS = ("cold_dir", "skip_corrupt")
NETWORK_SETTINGS = (
    "transport",
    "transports",
    "mode",
    "listen",
    "connect",
    "options",
    "wire",
    "payload_bytes_max",
    "close_timeout_s",
)


def configured_log() -> str | None:
    """Return the log that `ZBUS_LOG` or the TOML file names, or None."""
    from zbus.config import load_only

    return load_only("log").log


def open_to_read(log: str | Path) -> zbus.Bus:
    """Return a bus that only reads `log` and opens no socket.

    It does not validate events, because a user who looks at a log wants to see the events that violate a schema too.
    """
    from zbus.config import load_only

    return zbus.open(config=load_only(*READER_SETTINGS, log=str(log), read_only=True, validate_schemas=False))


def open_networked(transport: str | None, **given: str) -> zbus.Bus:
    """Return a bus without a log on `transport`, or on the transport that the settings name."""
    from zbus.config import load_only

    chosen = {"transport": transport, "transports": ()} if transport else {}
    return zbus.open(config=load_only(*NETWORK_SETTINGS, validate_schemas=False, **chosen, **given))


def open_source(log: str | None, transport: str | None) -> zbus.Bus:
    """Return a bus that reads `log`, or receives from `transport`, or from the source that the settings name."""
    if log is not None and transport is not None:
        raise typer.BadParameter("give either --log or --transport, not both", param_hint="--transport")
    if log is None and transport is None:
        log = configured_log()
    if log is not None:
        return open_to_read(log)
    bus = open_networked(transport)
    if not bus.config.networked:
        reason = "there is nothing to read: give --log LOG (or ZBUS_LOG), or --transport URL"
        raise ConfigInvalid("log", reason)
    return bus
