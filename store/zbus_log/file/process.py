"""Process identity: whether a stored process id still belongs to the process that stored it."""

from __future__ import annotations

import os
from pathlib import Path


def started_at(pid: int) -> int:
    """Return when a process started, in kernel ticks; 0 if the system does not report it."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_alive(pid: int, started: int) -> bool:
    """Return whether `pid` runs and started then: process ids are reused."""
    return is_running(pid) and started_at(pid) == started and not _is_zombie(pid)


def is_running(pid: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_zombie(pid: int) -> bool:
    """Return whether a process has ended but its parent has not collected its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return False
