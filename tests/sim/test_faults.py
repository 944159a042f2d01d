"""Every kind of fault has the effect that it claims."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

import zbus.sim
from zbus.sim import Fault, Faults, World
from zbus.sim.faults import KINDS

Scene = Callable[[World], Awaitable[None]]


async def publish(bus: Any) -> None:
    publisher = await bus.publisher("shop/a")
    while asyncio.get_running_loop().time() < 20.0:
        await asyncio.sleep(0.05)
        try:
            await publisher.publish(b"x" * 200)
        except zbus.LogError as error:
            failures.append(error)


failures: list[Exception] = []


async def read(bus: Any) -> None:
    async with bus.subscribe("shop/**", durable="billing") as subscription:
        async for _ in subscription:
            pass


def run_with(kind: str, *, strength: float = 0.9, node: float = 0.0, for_s: float = 3.0) -> World:
    """Two nodes, of which `a` publishes and `b` reads; one fault at 5 s. Nodes are chosen by a number: 0 is `a`."""
    failures.clear()
    world = World(seed=1, keep_trace=True)

    async def main() -> None:
        async with world:
            world.without(*zbus.sim.INVARIANTS)  # some faults break promises today: here only their effect matters
            await world.node("a", log=True, program=publish)
            await world.node("b", log=True, program=read)
            world.conditions(delay_s=(0.001, 0.002))
            await world.run(5.0)
            await world.actions.inject(Fault(5.0, kind, node, 0.0, for_s, strength))
            await world.run(10.0)

    zbus.sim.run(main())
    return world


def times(world: World, kind: str, node: str) -> list[float]:
    return [step.at_s for step in world.trace.steps if step.kind == kind and step.node == node]


def longest_pause(world: World, kind: str, node: str) -> float:
    """The longest time between two steps of a kind on a node, while the node publishes."""
    found = [at for at in times(world, kind, node) if 4.0 < at < 16.0]
    return max(after - before for before, after in pairwise(found))


def test_every_kind_is_counted_when_it_is_injected() -> None:
    for kind in KINDS:
        if kind != "aimed_kill":  # it may miss
            assert run_with(kind, node=0.0).faults_injected.get(kind, 0) >= 1, kind


@pytest.mark.parametrize("kind", ["partition", "isolate", "disconnect"])
def test_nothing_arrives_while_the_network_is_cut(kind: str) -> None:
    assert longest_pause(run_with(kind), "delivered", "b") > 2.5
    assert longest_pause(run_with("clock"), "delivered", "b") < 0.5


def test_a_one_way_cut_stops_only_one_way() -> None:
    world = run_with("one_way")  # from a to b
    assert longest_pause(world, "delivered", "b") > 2.5
    assert longest_pause(world, "arrived", "a") < 2.0


@pytest.mark.parametrize("kind", ["kill", "power_cut", "restart"])
def test_a_process_that_ends_starts_again(kind: str) -> None:
    world = run_with(kind)
    assert len(times(world, "started", "a")) == 2
    assert len(times(world, "killed", "a")) == (0 if kind == "restart" else 1)
    assert len(times(world, "stopped", "a")) == (2 if kind == "restart" else 1)
    assert longest_pause(world, "published", "a") > 2.5


def test_a_frozen_process_does_nothing_and_then_everything_that_was_due() -> None:
    world = run_with("freeze", node=0.9)
    assert longest_pause(world, "delivered", "b") > 2.5
    thawed = times(world, "thawed", "b")[0]
    assert len([at for at in times(world, "delivered", "b") if thawed <= at < thawed + 0.05]) > 30


def test_a_slow_link_takes_its_time() -> None:
    world = run_with("slow_link", strength=0.0)  # 2,000 bytes per second for frames of over 200 bytes, 20 per second
    first = next(step for step in world.trace.steps if step.kind == "published" and 7.5 < step.at_s < 8.0)
    identity = first.values[1:3]
    arrived = [s.at_s for s in world.trace.steps if s.kind == "delivered" and s.values[2:4] == identity]
    assert arrived[0] - first.at_s > 1.0


def test_a_slow_disk_delays_the_acknowledgement() -> None:
    assert longest_pause(run_with("slow_disk"), "published", "a") > 0.2
    assert longest_pause(run_with("clock"), "published", "a") < 0.1


def test_a_full_disk_refuses_events() -> None:
    run_with("disk_full")
    assert {type(error).__name__ for error in failures} == {"LogFull"}
    assert all(getattr(error, "outcome", "") == "refused" for error in failures)


def test_a_failing_disk_refuses_events_or_leaves_their_outcome_unknown() -> None:
    run_with("disk_errors")
    assert {getattr(error, "outcome", "") for error in failures} == {"refused", "unknown"}


def test_a_moved_clock_shows_in_the_events() -> None:
    found: list[float] = []

    async def main() -> None:
        async with zbus.sim.world(seed=1) as world:
            world.without(*zbus.sim.INVARIANTS)
            node = await world.node("a", log=True)
            publisher = await node.bus.publisher("shop/a")
            for strength in (None, 0.9):
                if strength is not None:
                    await world.actions.inject(Fault(0.0, "clock", 0.0, 0.0, 0.0, strength))
                offset = await publisher.publish(b"")
                assert node.disk is not None
                found.append(node.disk.rows[int(offset) - 1].published_at / 1e9)

    zbus.sim.run(main())
    assert abs(found[1] - found[0]) > 4.0


@pytest.mark.parametrize("step", ["received", "committed", "position stored", "acknowledged"])
def test_an_aimed_kill_hits_its_step(step: str) -> None:
    hit: list[str] = []

    async def main() -> None:
        async with zbus.sim.world(seed=3) as world:
            await world.node("a", log=True, program=publish)
            node = await world.node("b", log=True, program=read)
            await world.run(2.0)
            assert node.disk is not None
            node.disk.fsync_s = (0.3, 0.4)

            def kill() -> None:
                hit.append(step)
                node.kill()

            world.actions.aim(node, step, 1, kill)
            await world.until(lambda: hit, 60.0)
            node.disk.mend()
            await node.start()

    zbus.sim.run(main())
    assert hit == [step]


def test_a_restored_log_has_only_what_the_copy_had() -> None:
    world = run_with("restore")
    (fault,) = [step for step in world.trace.steps if step.kind == "fault" and step.values[0] == "restore"]
    copied, before = fault.values[2:4]
    assert isinstance(copied, int)
    assert isinstance(before, int)
    assert copied < before
    stored = [step.values[1] for step in world.trace.steps if step.kind == "stored" and step.at_s > fault.at_s]
    assert copied + 1 in stored  # the offsets are used again


def test_a_clone_has_the_same_log_id() -> None:
    world = run_with("clone")
    assert world.disks["a.db"].log_id == world.disks["a-clone.db"].log_id
    assert world.disks["a-clone.db"].rows


def test_a_flipped_bit_makes_an_event_unreadable() -> None:
    assert run_with("corrupt").disks["a.db"].corrupt


@pytest.mark.parametrize("kind", ["malformed", "forge"])
def test_a_strangers_frames_arrive(kind: str) -> None:
    world = run_with(kind, node=0.9)
    assert len(times(world, "injected", "b")) >= 40
    if kind == "malformed":
        assert any("EVENT_INVALID" in step.values for step in world.trace.steps if step.kind == "record")


def test_drops_duplicates_and_reordering_happen_at_the_given_rate() -> None:
    async def main() -> World:
        async with zbus.sim.world(seed=1) as world:
            await world.node("a", log=True, program=publish)
            await world.node("b", log=True, program=read)
            world.conditions(drop=0.2, duplicate=0.3)
            await world.run(15.0)
        return world

    counts = zbus.sim.run(main()).nets["sim://world"].counts
    total = counts["sent"] + counts["dropped"] + counts["duplicated"]
    assert 0.1 < counts["dropped"] / total < 0.3
    assert 0.15 < counts["duplicated"] / total < 0.35


def test_frames_of_one_key_keep_their_order_and_others_overtake_them() -> None:
    arrived: list[tuple[str, int]] = []

    async def main() -> None:
        async with zbus.sim.world(seed=2) as world:
            await world.node("a")
            await world.node("b")
            world.conditions(delay_s=(0.001, 0.05))
            await world.run(0.1)
            a, b = (world.nodes[name].fabrics[0] for name in "ab")
            b.listen(["x/*"], lambda frame, _: arrived.append((chr(frame[0]), frame[1])))
            await world.run(0.1)
            for number in range(50):
                a.send([(f"x/{key}", bytes([ord(key), number])) for key in "pq"])
                await world.run(0.002)
            await world.run(1.0)

    zbus.sim.run(main())
    for key in "pq":
        assert [number for each, number in arrived if each == key] == list(range(50))
    assert arrived != sorted(arrived, key=lambda each: (each[1], each[0]))


def test_a_plan_is_the_same_for_a_seed_and_a_fault_can_be_left_out() -> None:
    faults = Faults(kill=(1, 3), partition=2, freeze=(0, 2))
    world = World(seed=9)
    first, second = (faults.plan(world.source("plan"), 30.0) for _ in range(2))
    assert first == second
    assert [each.kind for each in first.faults].count("partition") == 2
    assert first.without(0).faults == first.faults[1:]
    assert faults.plan(World(seed=10).source("plan"), 30.0) != first


def test_an_unknown_fault_is_an_error() -> None:
    with pytest.raises(ValueError, match="no fault 'flood'"):
        Faults(flood=1)
