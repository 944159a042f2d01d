"""Threads of a service in a simulated world."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import zbus


def test_to_thread_works_in_a_program_and_takes_virtual_time() -> None:
    found: list[tuple[int, float]] = []

    async def program(bus: Any) -> None:
        begun = time.monotonic()
        found.append((await asyncio.to_thread(sum, [1, 2]), time.monotonic() - begun))

    async def main() -> None:
        async with zbus.sim.world() as world:
            node = await world.node("a", program=program)
            await world.run(1)
            node.kill()
            await node.start()
            await world.run(1)

    zbus.sim.run(main())

    assert [number for number, _ in found] == [3, 3]
    assert all(0 < took_s < 0.01 for _, took_s in found)


def test_to_thread_outside_of_a_node_says_where_it_works() -> None:
    async def main() -> None:
        async with zbus.sim.world():
            await asyncio.to_thread(print)

    with pytest.raises(zbus.sim.WorldBoundary, match="call it in the program of a node"):
        zbus.sim.run(main())
