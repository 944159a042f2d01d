"""A driver: calls a `step` whenever it is due or woken, until it is finished.

A loop that sleeps cannot be simulated. A step does what is due now and returns the time of the next call. The driver
owns the thread and does the waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from .run_id import inherit

# Does what is due. Returns the monotonic time of the next step (`inf`: only when woken), or None when finished.
Step = Callable[[], float | None]


class Driver(Protocol):
    """Runs a step. `wake` may be called on any thread."""

    def wake(self) -> None:
        """Call the step again soon, even if it is not due."""

    def join(self, timeout_s: float) -> bool:
        """Wait until the step has returned None; return whether it did within `timeout_s`."""


class ThreadDriver:
    """A daemon thread that waits between steps until the next one is due or `wake` is called."""

    def __init__(self, step: Step, name: str, monotonic: Callable[[], float]) -> None:
        self._step, self._monotonic = step, monotonic
        self._woken = threading.Event()
        self._thread = threading.Thread(target=inherit(self._run), name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Call the step again soon. A wake-up during a step is not lost."""
        if not self._woken.is_set():  # it is cleared before each step, so a step follows if it is set
            self._woken.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until the step has returned None; return whether it did within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._woken.clear()
            due = self._step()
            if due is None:
                return
            wait_s = due - self._monotonic()
            if wait_s > 0:
                self._woken.wait(min(wait_s, threading.TIMEOUT_MAX))
