"""A time limit that several steps share, and blocking calls that are not waited for beyond it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from .mailbox import Calls
from .runtime import Runtime

LEAST_S = 0.1  # what a step gets when nothing is left


class Deadline:
    """The end of a time limit, by the clock of the running event loop."""

    __slots__ = ("_at", "_time")

    def __init__(self, timeout_s: float) -> None:
        self._time = asyncio.get_running_loop().time
        self._at = self._time() + timeout_s

    def share(self, share: float = 1.0) -> float:
        """Return a share of the seconds that are left. As each step takes a share, the later ones keep some time."""
        return max(LEAST_S, (self._at - self._time()) * share)


async def run_within(timeout_s: float, call: Callable[[], object], runtime: Runtime, name: str) -> bool:
    """Run a blocking call on a thread of its own. Returns whether it ended within `timeout_s` seconds.

    If it did not, or if this is cancelled, it continues. The thread is a daemon: the process does not wait for it.
    """
    ended, calls = asyncio.Event(), Calls(asyncio.get_running_loop())

    def run() -> None:
        try:
            call()
        finally:
            calls.soon(ended.set)

    thread = runtime.thread(run, name)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await ended.wait()
        thread.join()  # it has nothing left to do
        return True
    return False
