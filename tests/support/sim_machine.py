"""A machine for a simulated log: a disk and a clock that a test moves, without a world around it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from zbus.ports.log import AppendResult, Outcome, Row
from zbus.sim.disk import Disk
from zbus.sim.log import SimLog

LONG_S = 1.0  # longer than any commit of a healthy disk


class Machine:
    """One disk, and the process that uses it."""

    def __init__(self, seed: int = 0) -> None:
        self.disk = Disk("app.db", Random(seed))
        self.now = 0.0
        self._chance = Random(f"process/{seed}")
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0

    def open(self, pid: int = 1, **options: Any) -> SimLog:
        return SimLog(self.disk, self.later, self.time_ns, self._chance, owner=f"process {pid}", pid=pid, **options)

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        self._number += 1
        heapq.heappush(self._due, (self.now + delay_s, self._number, call))

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def run(self, seconds: float = LONG_S) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = until

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
