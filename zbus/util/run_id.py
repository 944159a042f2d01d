"""Run ids: which node of this process some code works for. Log records without another correlation id carry it.

A node draws its id when it is made, and sets it in its own tasks and threads. Tasks and timers pass it on to what they
start. A thread has no id of its own: `inherit` passes on that of the code which starts it, and a mailbox that of the
code which made it. Code that works for no node has the id of the process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

T = TypeVar("T")

_OF_PROCESS = secrets.token_hex(8)
run_id: ContextVar[str] = ContextVar("zbus_run_id", default=_OF_PROCESS)


def inherit(target: Callable[[], T], id_: str | None = None) -> Callable[[], T]:
    """Return a function for a new thread that calls `target` with the given run id; without one, with the caller's."""
    return partial(_call, target, run_id.get() if id_ is None else id_)


def _call(target: Callable[[], T], id_: str) -> T:
    run_id.set(id_)
    return target()
