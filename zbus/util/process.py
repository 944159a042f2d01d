"""Process identity: whether a stored process id still belongs to the process that stored it.

A process id is unique within one boot of a machine and one PID namespace.

A forked process shares the file descriptors of its parent, and so its locks, but not its threads. Each object
that is registered with `on_fork` gives up in the child what it shares, without changing anything for the parent.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

_logger = logging.getLogger(__name__)


def started_at(pid: int) -> int:
    """Return when a process started, in kernel ticks; 0 if the system does not report it."""
    try:
        return int(_stat(pid)[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_alive(pid: int, started: int | None = None) -> bool:
    """Return whether `pid` runs and started then: process ids are reused. Without `started`, only whether it runs.

    A process that has ended is not alive, even if its parent has not collected its status yet.
    """
    return is_running(pid) and started in (None, started_at(pid)) and not _is_zombie(pid)


def is_running(pid: int) -> bool:
    """Return whether a process with this id exists. On Windows, it always returns True."""
    if sys.platform == "win32":  # os.kill would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    return True


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine; empty if the system does not report one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Return the PID namespace of this process, since a container has its own; empty if it is not reported."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _is_zombie(pid: int) -> bool:
    try:
        return _stat(pid)[0] in "ZX"
    except (OSError, IndexError):
        return False


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Inherited(Protocol):
    """An object that gives up what it shares with the parent process."""

    def forked(self, parent: int) -> None:
        """Give up what is shared with the process `parent`. Runs in the child, where other threads may hold locks."""


_registered: WeakSet[Inherited] = WeakSet()
_pid = os.getpid()


def on_fork(owner: Inherited) -> None:
    """Call `owner.forked` in each child process that is forked while the object exists."""
    _registered.add(owner)


def _forked() -> None:
    global _pid
    parent, _pid = _pid, os.getpid()
    for owner in list(_registered):
        try:
            owner.forked(parent)
        except Exception:  # the others must still be called
            _logger.exception("%r could not be given up in a forked process", type(owner))
    _registered.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forked)
