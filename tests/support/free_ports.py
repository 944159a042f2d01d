"""Ports for tests, each given out once, however many tests and runs of tests share the machine.

Whoever picks a port now and has it bound later, by another process perhaps, must not lose it in between. So a port is
held by the lock of a file for as long as the process lives that asked for it, and is below those that the system gives
to outgoing connections and to whoever binds to port 0.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

LOWEST, HIGHEST = 15_000, 32_000
TRIES = 2000

_held: list[IO[bytes]] = []


def free_port() -> int:
    """Return a loopback port that is free and that no other test is given."""
    return free_ports(1)


def free_ports(number: int) -> int:
    """The first of so many in a row."""
    for _ in range(TRIES):
        first = random.randrange(LOWEST, HIGHEST - number)
        locks = [_lock(port) for port in range(first, first + number)]
        if all(locks) and all(_is_free(port) for port in range(first, first + number)):
            _held.extend(lock for lock in locks if lock)
            return first
        for lock in locks:
            if lock is not None:
                lock.close()
    raise AssertionError(f"no {number} free ports in a row")


def _lock(port: int) -> IO[bytes] | None:
    folder = Path(tempfile.gettempdir(), f"zbus-test-ports-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    file = (folder / str(port)).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
