"""Whether a process that left its number somewhere is still the one running under it."""

from __future__ import annotations

import os
from pathlib import Path


def started_at(pid: int) -> int:
    """When a process started, in the kernel's ticks; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_alive(pid: int, started: int) -> bool:
    """Whether `pid` runs and is the process that started then: numbers are used again."""
    return is_running(pid) and started_at(pid) == started and not _is_zombie(pid)


def is_running(pid: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_zombie(pid: int) -> bool:
    """Whether it has ended, and only its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return False
