"""A world on real SQLite logs: the same trace as on simulated ones, and every difference is a broken invariant."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sim_mutants import SCENARIOS

import zbus
import zbus.sim
from zbus.keys import KeySet
from zbus.ports.log import Log, Schema, Span
from zbus.sim import Faults, InvariantBroken, World, WorldStuck
from zbus.sim.ledger import LOGS_EQUAL
from zbus.sim.scenarios.scenario import load_scenarios
from zbus_log import SqliteLog

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


async def publish(bus: Any) -> None:
    """Publish, with what a program may ask of the machine by chance."""
    publisher = await bus.publisher(f"shop/{bus.config.node}")
    for number in range(100):
        await publisher.publish(b"%d %d %d" % (number, random.randrange(1000), secrets.randbelow(1000)))
        await asyncio.sleep(random.random() / 5)


async def read(bus: Any) -> None:
    async with bus.subscribe("shop/**", durable="billing") as subscription:
        async for event in subscription:
            await event.ack()


KILLS = Faults(kill=(1, 3), power_cut=(0, 1), aimed_kill=(0, 2), restart=(0, 1), for_s=(0.1, 2.0))


def run(scene: Callable[[World], Awaitable[object]], seed: int = 1, logs: Any = "sqlite", **options: Any) -> World:
    world = World(seed, logs=logs, **options)

    async def main() -> None:
        async with world:
            await scene(world)

    zbus.sim.run(main())
    return world


def test_every_invariant_holds_with_kills_and_the_chance_of_programs_is_the_same() -> None:
    async def scene(world: World) -> None:
        await world.node("c", log=True, program=read)
        await world.run(1.0)
        for name in "ab":
            await world.node(name, log=True, program=publish)
        await world.play(KILLS, 10.0)

    kills = 0
    for seed in range(20):
        world = run(scene, seed)
        assert len(world.ledger.accounts["c", "billing"].got) > 80
        assert world.trace.hash == run(scene, seed, "simulated").trace.hash
        kills += sum(world.faults_injected.values())
    assert kills > 20


def real_of(world: World) -> Log:
    """The SQLite log of node a."""
    found: Any = world.disks["a.db"].real
    assert isinstance(found._log, SqliteLog)
    return found._log


def test_everything_is_in_the_real_log_before_and_after_a_kill() -> None:
    event = zbus.Event(7, 3, 1, "shop/a", b"4")
    schema = Schema("shop/**", 1, "strict", "hash", {"type": "object"}, 5)

    def content(world: World) -> list[Any]:
        log = real_of(world)
        events, error, _ = log.read(KeySet.all(), Span(), 100).events()
        cursors = [(each.name, each.offset, each.keys) for each in log.cursors.list()]
        return [[each.payload for each in events], error, cursors, log.positions.load(), list(log.schemas.load())]

    async def scene(world: World) -> None:
        node = await world.node("a", log=True)
        await (await node.bus.publisher("shop/a")).publish_many([b"1", b"2", b"3"])
        assert [offset.first for offset in await node.bus.put(event)] == [True]
        assert [offset.first for offset in await node.bus.put(event)] == [False]
        log = node.logs[-1]
        token = log.cursors.claim("worker", ["shop/**"], 1).token
        log.cursors.advance("worker", token, 3)
        for name in ("old", "gone"):
            log.cursors.release(name, log.cursors.claim(name, ["x"], 1).token)
        log.cursors.reset("old", 2)
        log.cursors.delete("gone")
        log.positions.store({"other/x": 1, "other/y": 2})
        log.positions.remove(["other/y"])
        log.schemas.store(schema)
        await world.run(1.0)
        before, first = content(world), real_of(world)
        node.kill()
        assert content(world) == before
        assert real_of(world) is not first
        before[3] = {name.partition("/")[0]: at for name, at in before[3].items()}
        assert before == [
            [b"1", b"2", b"3", b"4"],
            None,
            [("old", 2, ("x",)), ("worker", 3, ("shop/**",))],
            {"clock": 1_800_000_000_000_000_000, "other": 1, "out": 4, "own": 4},
            [schema],
        ]

    run(scene)


def test_a_position_that_a_power_cut_removed_is_not_in_the_real_log_either() -> None:
    lost: set[bool] = set()

    async def scene(world: World) -> None:
        node = await world.node("a", log=True)
        node.logs[-1].positions.store({"other/x": 1})
        world.disks["a.db"].store_positions({}, sync=True)
        node.logs[-1].positions.store({"other/x": 2})
        node.kill(power_cut=True)
        assert real_of(world).positions.load() == world.disks["a.db"].positions
        lost.add(world.disks["a.db"].positions["other/x"] == 1)

    for seed in range(12):
        run(scene, seed)
    assert lost == {True, False}


SPOILED: dict[str, str] = {
    "rows": "a page after offset 0",
    "offsets": "the offsets of an append",
    "identities": "the offsets of an append",
    "repeated": "the repeated rows of an append",
    "head": "the head after a restart",
    "cursors": "the cursors after a restart",
    "lease": "the lease of 'worker'",
    "position": "the position of 'worker'",
    "positions": "the names of positions after a restart",
    "schemas": "the schemas after a restart",
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_difference_from_the_real_log_is_found(spoil: str) -> None:
    async def scene(world: World) -> None:
        world.without(*[each for each in zbus.sim.INVARIANTS if each != LOGS_EQUAL])
        node = await world.node("a", log=True)
        publisher = await node.bus.publisher("shop/a")
        offset = await publisher.publish_many([b"1", b"2", b"3"])
        disk, log = world.disks["a.db"], node.logs[-1]
        lease = log.cursors.claim("worker", ["shop/**"], 1)
        if spoil == "rows":
            disk.rows[0], disk.rows[1] = disk.rows[1], disk.rows[0]
            assert [event.offset async for event in node.bus.replay("**")] == [1, 2, 3]
        elif spoil == "offsets":
            disk.rows.pop()
            await publisher.publish(b"4")
        elif spoil == "identities":
            disk.identities.clear()
            await node.bus.put(*[each async for each in node.bus.replay("**", until=offset[0])])
        elif spoil == "repeated":
            disk.identities[7, 3] = 3
            await node.bus.put(zbus.Event(7, 3, 1, "shop/a", b"3"))
        elif spoil == "head":
            disk.rows.append(disk.rows[0])
            node.kill()
        elif spoil == "cursors":
            disk.cursors["worker"] = disk.cursors["worker"]._replace(offset=2)
            node.kill()
        elif spoil == "lease":
            log.cursors.release("worker", lease.token)
            real_of(world).cursors.reset("worker", 3)
            log.cursors.claim("worker", ["shop/**"], 1)
        elif spoil == "position":
            real_of(world).close(5.0)
            log.cursors.advance("worker", lease.token, 2)
            await world.run(1.0)
        elif spoil == "positions":
            disk.positions["other/x"] = 1
            node.kill()
        elif spoil == "schemas":
            disk.schemas.append(Schema("shop/**", 1, "strict", "hash", {}, 5))
            node.kill()

    with pytest.raises(InvariantBroken, match=f"the simulated log equals the real one on a.*{SPOILED[spoil]}"):
        run(scene, converge_s=0.1)


@pytest.mark.parametrize("ends", ["well", "with an error", "stuck", "interrupted"])
def test_no_file_is_left_however_a_world_ends(ends: str) -> None:
    """That no thread of a log is left, every test checks."""
    folder: list[Path] = []

    async def scene(world: World) -> None:
        await world.node("a", log=True, program=publish)
        folder.append(Path(real_of(world).path).parent)
        await world.run(5)
        if ends == "with an error":
            raise KeyError("an error")
        if ends == "stuck":
            await asyncio.Event().wait()
        if ends == "interrupted":
            raise KeyboardInterrupt

    if ends == "well":
        run(scene)
    else:
        with pytest.raises((KeyError, WorldStuck, KeyboardInterrupt)):
            run(scene, limit_s=20.0)
    assert not folder[0].exists()


def test_an_unknown_kind_of_logs_is_an_error() -> None:
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
            cursors = node.logs[-1].cursors
            cursors.release("worker", cursors.claim("worker", ["shop/**"], 1).token)
            node.logs[-1].schemas.store(Schema("shop/**", 1, "strict", "hash", {}, 5))
            copy = node.disk.copy()
            await publisher.publish(b"3")
            await node.stop()
            node.disk.restore(copy)
            await node.start()
            await (await node.bus.publisher("shop/a")).publish(b"4")
            return [event.payload async for event in node.bus.replay("**")]

    assert zbus.sim.run(main()) == [b"1", b"2", b"4"]
