"""Clocks, randomness, threads and process identity, as one object per node.

Code that reads a clock, draws a random number or starts a thread takes a `Runtime` and never calls the standard
library directly, so that a simulator can run the same code under virtual time. Bind the methods at construction
(`self._time_ns = runtime.time_ns`): a bound method costs nothing on the publish path.
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any, Protocol, Self

from .driver import Driver, OnError, Step, ThreadDriver
from .process import boot_id
from .run_id import inherit, run_id


class Thread(Protocol):
    """A running thread."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout` seconds."""

    def is_alive(self) -> bool:
        """Return whether the thread is still running."""


class Runtime:
    """The operating system's clocks, randomness and threads. `REAL` is the one that every node uses by default."""

    def __init__(self) -> None:
        self.monotonic: Callable[[], float] = time.monotonic
        self.monotonic_ns: Callable[[], int] = time.monotonic_ns
        self.time_ns: Callable[[], int] = time.time_ns
        self.randbits: Callable[[int], int] = secrets.randbits
        self.token_hex: Callable[[int], str] = secrets.token_hex
        self.uniform: Callable[[float, float], float] = random.uniform
        self.pid: Callable[[], int] = os.getpid
        self.hostname: Callable[[], str] = platform.node
        self.boot_id: Callable[[], str] = boot_id
        self.run_id: str | None = None  # of the node that this runtime belongs to
        self.clock_zero_ns = self.time_ns() - self.monotonic_ns()  # what the clock showed when the machine booted

    def for_node(self) -> Self:
        """Return the runtime of a new node: the same clocks, randomness and threads, and a run id of its own."""
        own = copy(self)
        own.run_id = own.token_hex(8)
        own.clock_zero_ns = own.time_ns() - own.monotonic_ns()
        return own

    def steady_ns(self) -> int:
        """Return Unix time by a clock that is never set: it may be wrong, but by the same amount at all times.

        It continues over the restarts of a process if `clock_zero_ns` is kept until the machine boots.
        """
        return self.clock_zero_ns + self.monotonic_ns()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Set the run id of the node in the `with` block, and so in the tasks that it starts."""
        before = run_id.set(self.run_id or run_id.get())
        try:
            yield
        finally:
            with suppress(ValueError):  # a coroutine that was dropped in the block is closed in another context
                run_id.reset(before)

    # Threads have the run id of the node, or that of the code that starts them.

    def executor(self, threads: int, name: str) -> Executor:
        """Return an executor whose threads begin with `name`."""
        return ThreadPoolExecutor(threads, name, run_id.set, (self.run_id or run_id.get(),))

    def thread(self, target: Callable[[], Any], name: str) -> Thread:
        """Start a daemon thread."""
        started = threading.Thread(target=inherit(target, self.run_id), name=name, daemon=True)
        started.start()
        return started

    def driver(self, step: Step, name: str, on_error: OnError) -> Driver:
        """Call `step` until it returns None, on a thread of its own."""
        with self.running():
            return ThreadDriver(step, name, self.monotonic, on_error)


REAL = Runtime()
