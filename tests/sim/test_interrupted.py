"""A run that is interrupted, or begun at the wrong time, leaves nothing behind that changes the next one."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import zbus
import zbus.sim
from zbus.observe import records

PROGRAM = """
import gc, zbus.sim
async def interrupt(bus):
    import asyncio
    await asyncio.sleep(1.0)
    raise KeyboardInterrupt
async def main():
    async with zbus.sim.world(seed=3) as world:
        await world.node("b", log=True)
        await world.node("a", log=True, program=interrupt)
        await world.run(3.0)
try:
    zbus.sim.run(main())
except KeyboardInterrupt:
    pass
gc.collect()
"""


def test_an_interrupted_run_ends_quietly() -> None:
    done = subprocess.run([sys.executable, "-X", "dev", "-c", PROGRAM], capture_output=True, text=True, check=True)

    assert done.stderr == ""


def test_an_interrupted_world_is_forgotten() -> None:
    async def interrupt(bus: Any) -> None:
        await asyncio.sleep(1.0)
        raise KeyboardInterrupt

    async def main() -> None:
        async with zbus.sim.world(seed=3) as world:
            await world.node("a", log=True, program=interrupt)
            await world.run(3.0)

    with pytest.raises(KeyboardInterrupt):
        zbus.sim.run(main())
    gc.collect()

    assert [each for each in gc.get_objects() if isinstance(each, zbus.sim.World)] == []


def test_one_world_at_a_time() -> None:
    before = (time.time, time.sleep, threading.Thread.start, random.getstate(), records.logger.disabled)

    async def two() -> None:
        one, other = zbus.sim.world(seed=1), zbus.sim.world(seed=2)
        async with one:
            with pytest.raises(zbus.ZbusError, match="another simulated world runs in this process"):
                await other.__aenter__()
            await one.node("a", log=True)
        async with other:  # now it may begin
            await other.node("a", log=True)

    zbus.sim.run(two())

    assert (time.time, time.sleep, threading.Thread.start, random.getstate(), records.logger.disabled) == before


def test_faults_need_a_node() -> None:
    async def main() -> None:
        async with zbus.sim.world(seed=1) as world:
            await world.play(zbus.sim.Faults(kill=(1, 1)), 1.0)

    with pytest.raises(zbus.ConfigInvalid, match="has no nodes yet"):
        zbus.sim.run(main())
