"""Parts of a simulated world without the world: a disk with a log, or a network, and a clock that a test moves."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from real_timers import Timer

from zbus.ports.log import AppendResult, Outcome, Row
from zbus.sim.machine.disk import Disk
from zbus.sim.machine.fabric import Conditions, SimFabric, SimNet
from zbus.sim.machine.log import SimLog

LONG_S = 1.0  # longer than any commit of a healthy disk


class Time:
    """Virtual time. Calls are made by `run`, those of the same time in the order of their creation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Timer]] = []
        self._number = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Timer:
        self._number += 1
        timer = Timer(callback, args)
        heapq.heappush(self._due, (when, self._number, timer))
        return timer

    def later(self, delay_s: float, call: Callable[[], object]) -> Timer:
        return self.call_at(self.now + delay_s, call)

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def run(self, seconds: float = LONG_S) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._due)
            timer.run()
        self.now = until


class Machine(Time):
    """One disk, and the process that uses it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.disk = Disk("app.db", Random(seed))
        self._chance = Random(f"process/{seed}")

    def open(self, pid: int = 1, **options: Any) -> SimLog:
        return SimLog(self.disk, self.later, self.time_ns, self._chance, owner=f"process {pid}", pid=pid, **options)

    def kill(self, *, power_cut: bool = False) -> None:
        """kill -9: nothing that the process has scheduled runs any more."""
        self._due.clear()
        self.disk.process_ended(power_cut=power_cut)

    def outcome(self, log: SimLog, rows: Sequence[Row]) -> Outcome:
        """Append, and let time pass until the outcome is known."""
        found: list[AppendResult] = []
        log.append(rows, found.append)
        self.run()
        (result,) = found
        return result.outcome


class Wire(Time):
    """One network with nodes on it, and what each of them received."""

    def __init__(self, seed: int = 0, **conditions: Any) -> None:
        super().__init__()
        self.net = SimNet("sim://wire", self, lambda name: Random(f"{seed}/{name}"), lambda *step: None)
        self.net.set_conditions(Conditions(**conditions))
        self.received: dict[str, list[bytes]] = {}

    def open(self, name: str, *expressions: str, **options: Any) -> SimFabric:
        fabric = SimFabric(self.net, name, **options)
        found = self.received.setdefault(name, [])
        if expressions:
            fabric.listen(expressions, lambda frame, acknowledge: found.append(frame))
        return fabric
