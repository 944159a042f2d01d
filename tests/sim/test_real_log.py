"""A world on real SQLite logs: the same trace as on simulated ones, and every difference is a broken invariant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sim_mutants import SCENARIOS

import zbus.sim
from zbus.sim import InvariantBroken, World
from zbus.sim.scenarios.scenario import load_scenarios

ALL = {each.name: each for each in load_scenarios(SCENARIOS)}


def trace_of(name: str, seed: int, logs: Any) -> tuple[str, int]:
    world = World(seed, logs=logs)

    async def main() -> None:
        async with world:
            await ALL[name].play(world)

    zbus.sim.run(main())
    return world.trace.hash, world.trace.counts.get("delivered", 0)


@pytest.mark.parametrize("name", ["three_nodes", "aimed_kills", "disks_fail", "absent_subscribers_and_retention"])
def test_a_seed_has_the_same_trace_on_real_logs(name: str) -> None:
    for seed in range(5):
        hash_, delivered = trace_of(name, seed, "sqlite")
        assert (hash_, delivered) == trace_of(name, seed, "simulated"), seed
        assert delivered > 50


def test_the_trace_does_not_depend_on_the_process() -> None:
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}; from test_real_log import *; print(trace_of('sinks', 3, 'sqlite'))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)},
        ).stdout
        for hash_seed in ("0", "77")
    }
    assert found == {f"{trace_of('sinks', 3, 'sqlite')}\n"}


@pytest.mark.parametrize("spoil", ["rows", "offsets"])
def test_a_difference_from_the_real_log_is_found(spoil: str) -> None:
    async def main() -> None:
        async with zbus.sim.world(seed=1, logs="sqlite") as world:
            node = await world.node("a", log=True)
            publisher = await node.bus.publisher("shop/a")
            await publisher.publish_many([b"1", b"2", b"3"])
            disk = world.disks["a.db"]
            if spoil == "rows":
                disk.rows[0], disk.rows[1] = disk.rows[1], disk.rows[0]
                assert [event.offset async for event in node.bus.replay("**")] == [1, 2, 3]
            else:
                world.ledger.unchecked.add(zbus.sim.ledger.UNIQUE)
                disk.rows.pop()
                await publisher.publish(b"4")

    with pytest.raises(InvariantBroken, match="the simulated log equals the real one on a"):
        zbus.sim.run(main())


def test_the_files_are_removed_and_an_unknown_kind_is_an_error() -> None:
    async def main() -> Path:
        async with zbus.sim.world(seed=1, logs="sqlite") as world:
            await world.node("a", log=True)
            folder = Path(world._real_logs._folder)  # type: ignore[union-attr]
            assert list(folder.glob("*.db"))
            return folder

    assert not zbus.sim.run(main()).exists()
    with pytest.raises(zbus.ConfigInvalid, match="'simulated' or 'sqlite'"):
        World(1, logs="memory")  # type: ignore[arg-type]


def test_a_restored_log_is_real_too() -> None:
    async def main() -> list[bytes]:
        async with zbus.sim.world(seed=1, logs="sqlite") as world:
            world.without(zbus.sim.ledger.DELIVERED, zbus.sim.ledger.UNIQUE)
            node = await world.node("a", log=True)
            publisher = await node.bus.publisher("shop/a")
            await publisher.publish_many([b"1", b"2"])
            assert node.disk is not None
            copy = node.disk.copy()
            await publisher.publish(b"3")
            await node.stop()
            node.disk.restore(copy)
            await node.start()
            await (await node.bus.publisher("shop/a")).publish(b"4")
            return [event.payload async for event in node.bus.replay("**")]

    assert zbus.sim.run(main()) == [b"1", b"2", b"4"]
