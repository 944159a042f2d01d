"""A simulator: the production code of zbus on a simulated network, disk and clock, with seeded faults and virtual time.

    async def scenario():
        async with zbus.sim.world(seed=7) as world:
            a = await world.node("a", log=True)
            b = await world.node("b", log=True)
            world.partition(a, b)
            await world.run(seconds=60)

    zbus.sim.run(scenario())

The same seed gives the same run. See docs/simulator.md.
"""

from __future__ import annotations

import gc
from collections.abc import Coroutine
from inspect import iscoroutine
from typing import Any, TypeVar

from .errors import InvariantBroken, ProcessKilled, Violation, WorldBoundary, WorldStuck
from .faults import ORDINARY, Fault, Faults, Plan
from .ledger import INVARIANTS
from .machine.fabric import Conditions
from .machine.loop import SimLoop
from .machine.watchdog import watchdog
from .node import SimNode
from .scenarios.scenario import Scenario, scenario
from .world import Overrides, World

__all__ = [
    "INVARIANTS",
    "ORDINARY",
    "Conditions",
    "Fault",
    "Faults",
    "InvariantBroken",
    "Overrides",
    "Plan",
    "ProcessKilled",
    "Scenario",
    "SimLoop",
    "SimNode",
    "Violation",
    "World",
    "WorldBoundary",
    "WorldStuck",
    "run",
    "scenario",
    "world",
]

T = TypeVar("T")

world = World


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine under virtual time, as `asyncio.run` does under real time.

    >>> import asyncio
    >>> run(asyncio.sleep(3600, "an hour later"))
    'an hour later'
    """
    if not iscoroutine(main):
        raise TypeError(f"zbus.sim.run takes a coroutine: write zbus.sim.run({getattr(main, '__name__', 'main')}())")
    loop = SimLoop()  # type: ignore[abstract]  # what it does not have is added by name
    collects = gc.isenabled()
    gc.disable()  # a collection would run finalizers at times that differ from run to run
    try:
        with watchdog(loop.beat):
            result: T = loop.run_until_complete(main)
            loop.finish()
        return result
    except BaseException:
        loop.abandon()
        raise
    finally:
        loop.close()
        if collects:
            gc.enable()
