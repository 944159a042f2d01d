"""The boundary of a simulated world: what code in it may ask of the machine.

Clocks and random numbers that a handler reads from the standard library are those of the world, so that a seed gives
the same run. Threads, sockets, processes and blocking sleeps cannot be simulated: they raise `WorldBoundary`. Names
that a module bound before (`from time import time`), and `datetime.now()`, cannot be replaced; read the time with
`time.time()` instead.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from zbus.errors import ZbusError
from zbus.sim.errors import WorldBoundary

from .loop import SimLoop

REFUSED = (
    (time, "sleep", "time.sleep()", "use `await asyncio.sleep(…)`"),
    (threading.Thread, "start", "a thread", "use `await asyncio.to_thread(…)`, which is simulated"),
    (socket.socket, "__init__", "a socket", "use the bus; the network of a world has nothing else"),
    (subprocess.Popen, "__init__", "a process", "start another node with `world.node(…)`"),
)


@contextmanager
def boundary(loop: SimLoop, time_ns: Callable[[], int], chance: Random) -> Iterator[None]:
    """Replace clocks and chance, and refuse what cannot be simulated, for code that runs on `loop`.

    Other threads of this process keep the real ones. One world at a time: records and `random` belong to the process.
    """
    if not _one_world.acquire(blocking=False):
        raise ZbusError("another simulated world runs in this process; end it first, or use another process")
    saved: list[tuple[Any, str, Any]] = []
    shared, another = random._inst, Random()

    def replace(owner: Any, name: str, here: Callable[..., Any], elsewhere: Any = None) -> None:
        """Call `here` in the world and `elsewhere` (by default the original) in other threads."""
        real = getattr(owner, name)
        other = real if elsewhere is None else elsewhere
        saved.append((owner, name, real))

        def choose(*args: Any, **options: Any) -> Any:
            use = here if asyncio._get_running_loop() is loop and not _outside else other
            return use(*args, **options)

        setattr(owner, name, choose)

    replace(time, "time", lambda: time_ns() / 1e9)
    replace(time, "time_ns", time_ns)
    for name in ("monotonic", "perf_counter"):
        replace(time, name, loop.time)
        replace(time, f"{name}_ns", lambda: int(loop.time() * 1e9))
    for owner, name, what, instead in REFUSED:
        replace(owner, name, _refusing(what, instead))
    replace(os, "urandom", chance.randbytes)
    replace(random, "_urandom", chance.randbytes)  # what `secrets` reads
    seed = random.Random.seed

    def seeded(self: Random, a: Any = None, version: int = 2) -> None:
        seed(self, chance.getrandbits(64) if a is None else a, version)

    replace(random.Random, "seed", seeded)
    state = shared.getstate()
    # The world has the generator of the module, also for names that were bound before. Other threads get another one.
    for name in random.__all__:
        if getattr(getattr(random, name), "__self__", None) is shared:
            replace(random, name, getattr(shared, name), getattr(another, name))
    shared.seed(chance.getrandbits(64))
    try:
        yield
    finally:
        shared.setstate(state)
        for owner, name, real in reversed(saved):
            setattr(owner, name, real)
        _one_world.release()


_one_world = threading.Lock()
_outside: list[None] = []  # not empty while a part of the simulator itself uses the machine


@contextmanager
def outside() -> Iterator[None]:
    """Let the simulator itself use the machine, such as a real log with its thread.

    Clocks and chance are real in the `with` block: a world with real logs has the same chance as one without them.
    """
    _outside.append(None)
    try:
        yield
    finally:
        _outside.pop()


def _refusing(what: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        frame = sys._getframe(2)
        opens = False
        while frame.f_back is not None:
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package not in _STANDARD and not package.startswith("zbus"):
                break
            opens = opens or package.startswith("zbus")
            frame = frame.f_back
        caller = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if opens:  # a bus that is not part of the world
            raise WorldBoundary(f"{what} of a real bus", "open a bus with `await world.node(…)`", caller)
        raise WorldBoundary(what, instead, caller)

    return refuse


_STANDARD = sys.stdlib_module_names
