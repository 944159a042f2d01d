"""Real time for parts of the simulator outside of a world: the contract suites drive them with real threads."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from typing import Any

END_S = 20.0


class Timer:
    """A call that is due at a time."""

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._call: Callable[..., object] | None = call
        self._args = args

    def cancel(self) -> None:
        self._call = None

    def run(self) -> None:
        if self._call is not None:
            self._call(*self._args)


class Timers:
    """A thread that makes calls when they are due, those due at the same time in the order of their creation.

    Each call is made while `lock` is held.
    """

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        self._lock = nullcontext() if lock is None else lock
        self._due: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="contract-timers", daemon=True)
        self._thread.start()

    def time(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Timer:
        timer = Timer(callback, args)
        with self._changed:
            heapq.heappush(self._due, (when, next(self._numbers), timer))
            self._changed.notify()
        return timer

    def later(self, delay_s: float, call: Callable[[], object]) -> Timer:
        return self.call_at(time.monotonic() + delay_s, call)

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ended and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._ended:
                    return
                timer = heapq.heappop(self._due)[2]
            with self._lock:
                timer.run()
