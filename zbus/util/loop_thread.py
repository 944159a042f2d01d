"""An event loop on a thread of its own, for code that is called from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from .mailbox import Calls
from .runtime import REAL, Runtime, Thread

ALIVE_CHECK_S = 1.0
END_S = 1.0
WORKERS = 4

T = TypeVar("T")


class LoopEnded(RuntimeError):
    """Raised when the event loop is not running, so the coroutine did not finish."""


class LoopThread:
    """Runs `main()` on an event loop of its own, from `start` on until it returns. Any thread may call the rest.

    `main` should return soon after `stopping` is set. Tasks that are left then are cancelled.
    """

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, object]], runtime: Runtime = REAL) -> None:
        self.loop = asyncio.new_event_loop()
        self.stopping = asyncio.Event()
        self._name, self._main, self._runtime = name, main, runtime
        self._calls = Calls(self.loop)
        self._thread: Thread | None = None
        self._ident: int | None = None

    @property
    def alive(self) -> bool:
        """Whether the loop was started and its thread has not ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.get_ident() == self._ident

    def start(self) -> None:
        """Start the thread."""
        self._thread = self._runtime.thread(self._run, self._name)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop soon; nothing happens once the loop is closed."""
        self._calls.soon(function, *args)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Raises `LoopEnded` if the loop is not running."""
        try:
            if not self.alive:
                raise RuntimeError
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # including a loop that was closed since the check
            work.close()
            raise LoopEnded(f"{self._name} is not running") from None

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result.

        The coroutine is cancelled if the wait is interrupted or takes longer than `timeout_s`. Raises `TimeoutError`
        then, and `LoopEnded` if the loop ended before the coroutine did.
        """
        future = self.begin(work)
        ends_at = None if timeout_s is None else self._runtime.monotonic() + timeout_s
        try:
            while True:
                left_s = ALIVE_CHECK_S if ends_at is None else min(ALIVE_CHECK_S, ends_at - self._runtime.monotonic())
                if wait((future,), max(0.0, left_s)).done:
                    break
                if not self.alive:  # a coroutine that was posted after the loop stopped never finishes
                    raise LoopEnded(f"{self._name} ended")
                if left_s <= 0:
                    raise TimeoutError(f"{self._name}: no result within {timeout_s:g} s")
            if future.cancelled():
                raise LoopEnded(f"{self._name} ended")
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, timeout_s: float) -> bool:
        """Set `stopping` and wait for the thread to end. Return whether it has. Safe to call twice."""
        if self._thread is None:
            self.loop.close()
            return True
        self.post(self.stopping.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._ident = threading.get_ident()
        workers = self._runtime.executor(WORKERS, f"{self._name}-worker")
        self.loop.set_default_executor(workers)
        try:
            self.loop.run_until_complete(self._main())
        finally:
            try:
                self.loop.run_until_complete(_end())
            finally:
                workers.shutdown(wait=False, cancel_futures=True)
                self.loop.close()


async def _end() -> None:
    """Cancel the remaining tasks and close generators, within `END_S` seconds."""
    loop = asyncio.get_running_loop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    left |= {loop.create_task(loop.shutdown_asyncgens())}
    await asyncio.wait(left, timeout=END_S)
