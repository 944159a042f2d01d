"""Objects that a forked child process inherits and must not use.

A child shares the file descriptors of its parent, and so its locks, but has none of its threads. Each registered object
gives up in the child what it shares, without touching the state of the parent, and rejects every use.
"""

from __future__ import annotations

import logging
import os
from typing import Protocol
from weakref import WeakSet

logger = logging.getLogger(__name__)


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
            logger.exception("%r could not be given up in a forked process", type(owner))
    _registered.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forked)
