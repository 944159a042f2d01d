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
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol

from .driver import Driver, OnError, Step, ThreadDriver


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

    def executor(self, threads: int, name: str) -> Executor:
        """Return an executor whose threads begin with `name`."""
        return ThreadPoolExecutor(threads, name)

    def thread(self, target: Callable[[], Any], name: str) -> Thread:
        """Start a daemon thread."""
        started = threading.Thread(target=target, name=name, daemon=True)
        started.start()
        return started

    def driver(self, step: Step, name: str, on_error: OnError) -> Driver:
        """Call `step` until it returns None, on a thread of its own."""
        return ThreadDriver(step, name, self.monotonic, on_error)


REAL = Runtime()
