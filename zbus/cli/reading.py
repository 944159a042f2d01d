"""Opening a log to read it: beside its owner, or without one. Reading never needs to own a log."""

from __future__ import annotations

from pathlib import Path

import zbus


def open_to_read(log: Path) -> zbus.Bus:
    """A bus that only reads `log`; nothing of the environment makes it open a socket.

    Whoever looks at a log wants to see what is in it, also what no schema accepts.
    """
    return zbus.open(log, read_only=True, mode="embedded", listen=(), connect=(), check_schemas=False)
