"""Access to the node's log from the event loop: the log, and the threads that run blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from zbus.errors import BusClosed, LogRequired
from zbus.ports.log import Log

T = TypeVar("T")

STALE_S = 0.005  # the pause before a stale log is read again


class CallThreads:
    """Threads for blocking calls. `executor` is set while the node is open.

    They know nothing of the node that has them. Events that wait in a durable subscription lead to what acknowledges
    them, and so to these threads. The garbage collector does not see events, so if the threads led back to the node, a
    node that is dropped with such events, as a killed one of a simulated world is, would stay in memory.
    """

    __slots__ = ("executor",)

    def __init__(self) -> None:
        self.executor: Executor | None = None

    def run(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run a blocking call on a thread. Raises `BusClosed`, now or later, if the node closes first."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        try:
            if self.executor is None:
                raise BusClosed("read")
            running = loop.run_in_executor(self.executor, lambda: call(*args))
        except RuntimeError:  # the executor was shut down
            raise BusClosed("read") from None
        running.add_done_callback(partial(_settle, result))
        result.add_done_callback(lambda _: running.cancel())
        return result


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


def _settle(result: asyncio.Future[T], running: asyncio.Future[T]) -> None:
    """Pass on the outcome of a call. One that was cancelled before it began was so because the executor ended."""
    error = BusClosed("read") if running.cancelled() else running.exception()
    if result.done():
        return
    result.set_result(running.result()) if error is None else result.set_exception(error)
