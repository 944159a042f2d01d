"""Real SQLite logs in a simulated world: the same promises, the same trace for a seed, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import zbus
import zbus.sim
from zbus.sim import Faults, InvariantBroken, World, WorldBoundary, WorldStuck
from zbus.sim.machine import real_log
from zbus.sim.machine.real_log import RealDisk, waited
from zbus_log import SqliteLog

SEEDS = range(20)
KILLS = Faults(kill=(1, 3), power_cut=(0, 1), aimed_kill=(0, 2), restart=(0, 1), for_s=(0.1, 2.0))


async def publish(bus: Any) -> None:
    publisher = await bus.publisher(f"shop/{bus.config.node}")
    for number in range(100):
        await publisher.publish(b"%d" % number)
        await asyncio.sleep(0.1)


async def read(bus: Any) -> None:
    async with bus.subscribe("shop/**", durable="billing") as subscription:
        async for event in subscription:
            await event.ack()


async def scene(world: World) -> None:
    await world.node("c", log=True, program=read)
    await world.run(1.0)
    for name in "ab":
        await world.node(name, log=True, program=publish)
    await world.play(KILLS, 10.0)


def run(seed: int = 1, play: Any = scene, **options: Any) -> World:
    world = World(seed, logs="sqlite", **options)

    async def main() -> None:
        async with world:
            await play(world)

    zbus.sim.run(main())
    return world


def folders() -> set[Path]:
    return set(real_log.IN_MEMORY.glob("zbus-sim-*"))


def test_every_invariant_holds_with_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SqliteLog] = []
    open_real = RealDisk.open

    def counted(self: RealDisk, read_only: bool) -> None:
        open_real(self, read_only)
        assert isinstance(self.real, SqliteLog)
        opened.append(self.real)

    monkeypatch.setattr(RealDisk, "open", counted)
    kills = 0
    for seed in SEEDS:
        world = run(seed)
        kills += sum(world.faults_injected.values())
        assert len(world.ledger.accounts["c", "billing"].got) >= 120
        assert world.trace.counts["stored"] > 120
    assert kills > len(SEEDS)
    assert len(opened) == 3 * len(SEEDS) + kills  # each restart opens the file again


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from test_real_log import run
print(*[run(seed).trace.hash for seed in (3, 4)])
"""


def test_a_seed_has_the_same_trace_in_processes_with_different_hash_seeds_and_when_it_is_repeated() -> None:
    program = PROGRAM.format(folder=str(Path(__file__).parent))
    found = []
    for hash_seed in ("0", "12345"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    here = [run(seed).trace.hash for seed in (4, 3, 4)]

    assert found[0] == found[1] == [here[1], here[0]]
    assert here[0] == here[2]
    assert len(set(here)) == 2


def test_a_restarted_process_finds_what_the_killed_one_stored() -> None:
    found: list[Any] = []

    async def play(world: World) -> None:
        node = await world.node("a", log=True)
        disk = world.disks["a.db"]
        assert isinstance(disk, RealDisk)
        publisher = await node.bus.publisher("shop/a")
        await publisher.publish_many([b"%d" % number for number in range(10)])
        for power_cut in (False, True):
            before = disk.real
            assert before is not None
            ids = before.log_id
            node.kill(power_cut=power_cut)
            assert disk.real is None
            await node.start()
            assert disk.real is not None
            assert disk.real is not before
            assert disk.real.log_id == ids == disk.log_id
            found.append([event.payload async for event in node.bus.replay("**")])
        assert await node.bus.head() == 10

    run(play=play)
    assert found == [[b"%d" % number for number in range(10)]] * 2


def test_a_position_that_a_power_cut_removed_is_not_in_the_real_log_either() -> None:
    lost: set[bool] = set()

    async def play(world: World) -> None:
        node = await world.node("a", log=True)
        disk, log = world.disks["a.db"], node.logs[-1]
        log.positions.store({"other/x": 1, "other/y": 1})
        disk.store_positions({}, sync=True)
        log.positions.remove(["other/y"])
        log.positions.store({"other/x": 2})
        node.kill(power_cut=True)
        await node.start()
        assert isinstance(disk, RealDisk)
        assert disk.real is not None
        real = disk.real.positions.load()
        assert real == disk.positions == node.logs[-1].positions.load()
        lost.add(real["other/x"] == 1)

    for seed in range(12):
        run(seed, play)
    assert lost == {True, False}


def test_a_flipped_bit_ends_a_replay_or_is_skipped() -> None:
    async def play(world: World) -> None:
        node = await world.node("a", log=True)
        await (await node.bus.publisher("shop/a")).publish_many([b"0", b"1", b"2"])
        world.disks["a.db"].corrupt.add(2)
        found: list[bytes] = []
        with pytest.raises(zbus.EventCorrupt):
            found += [event.payload async for event in node.bus.replay("**")]
        assert [event.payload async for event in node.bus.replay("**", skip_corrupt=True)] == [b"0", b"2"]

    run(play=play)


def test_a_difference_between_the_two_logs_is_noticed() -> None:
    async def play(world: World) -> None:
        node = await world.node("a", log=True)
        publisher = await node.bus.publisher("shop/a")
        await publisher.publish(b"1")
        row = world.disks["a.db"].rows.pop()
        del world.disks["a.db"].identities[row.publisher_id, row.sequence]
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await publisher.publish(b"2")

    with pytest.raises(InvariantBroken, match=r"LogsDiffer\('the offsets of an append', \[1\], \[2\]\)"):
        run(play=play, converge_s=1.0)


@pytest.mark.parametrize("kind", ["restore", "clone"])
def test_the_files_of_a_real_log_are_not_copied(kind: str) -> None:
    async def play(world: World) -> None:
        await world.node("a", log=True)
        await world.play(Faults(**{kind: 1}), 5.0)

    with pytest.raises(WorldBoundary, match="use simulated logs"):
        run(play=play)


def test_retention_and_other_logs_are_refused() -> None:
    async def play(world: World) -> None:
        await world.node("a", log=True, retain_events=10)

    with pytest.raises(zbus.ConfigInvalid, match="use simulated logs for retention"):
        run(play=play)
    with pytest.raises(zbus.ConfigInvalid, match="must be 'simulated' or 'sqlite', not 'oracle'"):
        zbus.sim.world(logs="oracle")


@pytest.mark.parametrize("ends", ["well", "with an error", "stuck", "never"])
def test_nothing_is_left_behind_however_a_world_ends(ends: str) -> None:
    """That no thread of a log is left, every test checks."""
    before = folders()

    async def play(world: World) -> None:
        await world.node("a", log=True, program=publish)
        await world.run(5)
        assert folders() > before
        if ends == "with an error":
            raise KeyError("an error")
        if ends == "stuck":
            await asyncio.Event().wait()
        if ends == "never":
            raise KeyboardInterrupt

    if ends == "well":
        run(play=play)
    else:
        with pytest.raises((KeyError, WorldStuck, KeyboardInterrupt)):
            run(play=play, limit_s=20.0)
    assert folders() == before


def test_a_world_that_is_never_entered_makes_no_folder() -> None:
    before = folders()
    zbus.sim.world(logs="sqlite")

    assert folders() == before


def test_a_real_log_that_does_not_reply_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_log, "REAL_S", 0.01)

    with pytest.raises(WorldStuck, match="did not reply"):
        waited(SimpleQueue())
