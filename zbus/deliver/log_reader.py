"""Access to the node's log from the event loop: the log, and the threads that run blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from zbus.errors import LogRequired
from zbus.ports.log import Log

T = TypeVar("T")

STALE_S = 0.005  # the pause before a stale log is read again


class LogReader(NamedTuple):
    """Shared by the subscriptions and replays of one node."""

    log: Log | None
    run: Callable[..., asyncio.Future[Any]]  # run a blocking call on a thread of the node
    skip_corrupt: bool

    @property
    def read_only(self) -> bool:
        """Whether another process owns the log, so that no commit is seen here."""
        return self.log is not None and self.log.read_only

    def required(self, doing: str) -> Log:
        """Return the log. Raises `LogRequired` if this bus has no log; `doing` names the call that needs it."""
        if self.log is None:
            raise LogRequired(doing)
        return self.log
