"""Errors of the simulator: a broken invariant, a world that is stuck, and a call that leaves the simulation."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Iterator, Sequence
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NamedTuple

from zbus.errors import ZbusError

if TYPE_CHECKING:
    from typing import Protocol

    class _HasTasks(Protocol):
        def open_tasks(self) -> list[asyncio.Task[Any]]: ...


SHOWN_VIOLATIONS = 10
_OWN = ("asyncio.", "zbus.sim.", "zbus.testing.")


class Violation(NamedTuple):
    """One broken promise."""

    invariant: str  # such as "acknowledged events are delivered"
    at_s: float  # virtual time
    node: str  # the node that noticed it; empty for the whole world
    what: str  # a sentence with the events and nodes

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"{self.invariant}{where} at {self.at_s:.3f} s: {self.what}"


class InvariantBroken(ZbusError):
    """A promise was broken in a simulated world. `seed` repeats it, and `violations` says what happened."""

    def __init__(self, seed: int, violations: Sequence[Violation]) -> None:
        super().__init__(seed, tuple(violations))
        self.seed, self.violations = seed, tuple(violations)

    def __str__(self) -> str:
        shown = [f"  {each}" for each in self.violations[:SHOWN_VIOLATIONS]]
        if len(self.violations) > SHOWN_VIOLATIONS:
            shown.append(f"  and {len(self.violations) - SHOWN_VIOLATIONS} more")
        count = len(self.violations)
        return "\n".join([f"seed {self.seed} breaks {count} invariant{'s' if count > 1 else ''}:", *shown])


class WorldStuck(ZbusError):
    """The simulated world cannot continue. `waiting` shows where the tasks of the scenario wait."""

    def __init__(self, reason: str, loop: _HasTasks | None = None) -> None:
        self.reason, self.waiting = reason, _waiting(loop) if loop is not None else ""
        super().__init__(reason)

    def __str__(self) -> str:
        return f"{self.reason}\n{self.waiting}" if self.waiting else self.reason


class WorldBoundary(ZbusError):
    """Simulated code called something that cannot be simulated. Nothing was done."""

    def __init__(self, call: str, instead: str, caller: str = "") -> None:
        super().__init__(call, instead, caller)
        self.call, self.instead, self.caller = call, instead, caller

    def __str__(self) -> str:
        by = f", called at {self.caller}," if self.caller else ""
        return f"{self.call}{by} cannot be simulated: {self.instead}"


class ProcessKilled(ZbusError):
    """The simulated process in which a call ran was killed. The call has no result, as if the machine had failed."""

    def __init__(self, process: str) -> None:
        super().__init__(process)
        self.process = process

    def __str__(self) -> str:
        return f"process {self.process} was killed before the call returned"


def place_of(error: BaseException) -> str:
    """Return ` at FILE:LINE`, where code that is not part of zbus or Python raised it; empty if there is none."""
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        module, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if not module.startswith(("zbus.", "asyncio.")) and not file.startswith("<") and file != runpy.__file__:
            found = f" at {file}:{line}"
    return found


def told(error: BaseException) -> str:
    """Return an exception in words, with the line of the program that raised it."""
    if isinstance(error, WorldBoundary):
        return str(error)  # names the line
    return f"{error!r}{place_of(error)}"


def _waiting(loop: _HasTasks) -> str:
    """Return where each task of the scenario waits, the innermost line first, without lines of the simulator."""
    lines: list[str] = []
    for task in loop.open_tasks():
        places = [place for module, place in _places(task.get_coro()) if not module.startswith(_OWN)]
        if places:
            lines += [f"waits in {places[-1]}", *[f"  called by {each}" for each in reversed(places[:-1])]]
    return "\n".join(lines)


def _places(waiting: Any) -> Iterator[tuple[str, str]]:
    """Return the modules and lines of coroutines that wait for each other, the outermost first."""
    while waiting is not None and (frame := getattr(waiting, "cr_frame", None)) is not None:
        module = frame.f_globals.get("__name__", "")
        yield module, f"{frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}"
        waiting = waiting.cr_await
