"""A driver: calls a `step` whenever it is due or woken, until it is finished.

A loop that sleeps cannot be simulated. A step does what is due now and returns the time of the next call. The driver
owns the thread and does the waiting. A step that raises is reported and called again after a pause: if the
thread ended, everything that depends on it would stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from .backoff import Backoff
from .run_id import inherit

RETRY_S = (0.05, 2.0)

# Does what is due. Returns the monotonic time of the next step (`inf`: only when woken), or None when finished.
Step = Callable[[], float | None]

# Called with an exception of a step, and the pause before the next step (None: the driver ends).
OnError = Callable[[BaseException, float | None], None]


class Driver(Protocol):
    """Runs a step. `wake` may be called on any thread."""

    def wake(self) -> None:
        """Call the step again soon, even if it is not due."""

    def join(self, timeout_s: float) -> bool:
        """Wait until the step has returned None; return whether it did within `timeout_s`."""


class ThreadDriver:
    """A daemon thread that waits between steps until the next one is due or `wake` is called."""

    def __init__(self, step: Step, name: str, monotonic: Callable[[], float], on_error: OnError) -> None:
        self._step, self._monotonic, self._on_error = step, monotonic, on_error
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
        pauses = Backoff(*RETRY_S)
        while True:
            self._woken.clear()
            try:
                due = self._step()
            except (SystemExit, KeyboardInterrupt) as error:
                self._on_error(error, None)
                return
            except BaseException as error:  # a panic of a Rust library is not an `Exception`
                pause_s = pauses.next()
                self._on_error(error, pause_s)
                time.sleep(pause_s)  # `wake` must not shorten it: each new event would try again
                continue
            pauses.reset()
            if due is None:
                return
            wait_s = due - self._monotonic()
            if wait_s > 0:
                self._woken.wait(min(wait_s, threading.TIMEOUT_MAX))
