"""A world as its users see it: nodes and their programs, calls from outside, time, and the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from inside import node_of

import zbus
import zbus.sim
from zbus.sim import InvariantBroken, Overrides, ProcessKilled, World, WorldStuck


def play(scene: Callable[[World], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with zbus.sim.world(seed=1, **options) as world:
            return await scene(world)

    return zbus.sim.run(main())


async def read(bus: Any) -> None:
    async with bus.subscribe("shop/**", durable="billing") as subscription:
        async for _ in subscription:
            pass


def test_virtual_minutes_cost_real_milliseconds() -> None:
    async def scene(world: World) -> None:
        await world.node("a", log=True)
        await world.run(seconds=600)
        assert world.now >= 600

    began = time.perf_counter()
    play(scene)
    assert time.perf_counter() - began < 5.0


def test_the_example_of_the_documentation() -> None:
    async def scene(world: World) -> None:
        a = await world.node("a", log=True)
        b = await world.node("b", log=True, program=read)
        await world.run(1.0)
        world.partition(a, b)
        publisher = await a.bus.publisher("shop/orders")
        await publisher.publish({"n": 1})
        await world.run(seconds=60)
        assert not world.ledger.accounts["b", "billing"].got
        world.mend(a, b)
        await world.converge()
        assert len(world.ledger.accounts["b", "billing"].got) == 1

    play(scene)


def test_a_program_runs_again_after_each_start_with_a_new_bus() -> None:
    buses: list[Any] = []

    async def program(bus: Any) -> None:
        buses.append(bus)
        await asyncio.Event().wait()

    async def scene(world: World) -> None:
        node = await world.node("a", log=True, program=program)
        await world.run(1.0)
        node.kill()
        await world.run(1.0)
        await node.start()
        await world.run(1.0)
        await node.stop()
        await node.start()
        await world.run(1.0)

    play(scene)
    assert len(buses) == len({id(bus) for bus in buses}) == 3


def test_a_killed_program_runs_no_finally_block_and_a_stopped_one_does() -> None:
    ended: list[str] = []

    async def program(bus: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(f"{asyncio.get_running_loop().time():.0f}")

    async def scene(world: World) -> None:
        node = await world.node("a", program=program)
        await world.run(1.0)
        node.kill()
        await world.run(1.0)
        assert ended == []
        await node.start()
        await world.run(1.0)
        await node.stop()
        assert ended == ["3"]

    play(scene)


def test_a_call_to_a_node_that_is_killed_raises() -> None:
    async def scene(world: World) -> None:
        node = await world.node("a", log=True)
        assert node.disk is not None
        node.disk.fsync_s = (5.0, 5.0)
        publisher = await node.bus.publisher("shop/a")
        publishing = asyncio.ensure_future(publisher.publish(b"1"))
        await world.run(1.0)
        node.kill()
        with pytest.raises(ProcessKilled, match="a#1"):
            await publishing
        with pytest.raises(ProcessKilled):
            await publisher.publish(b"2")
        with pytest.raises(ProcessKilled):
            _ = node.bus
        assert await node.start() is node
        assert await node.bus.head() in (0, 1)

    play(scene)


def test_a_subscription_of_the_scenario_ends_with_its_process() -> None:
    async def scene(world: World) -> None:
        node = await world.node("a", log=True)
        async with node.bus.subscribe("shop/**") as subscription:
            reading = asyncio.ensure_future(anext(subscription))
            await world.run(1.0)
            node.kill()
            with pytest.raises(ProcessKilled):
                await reading
            await node.start()

    play(scene)


def test_handlers_requests_replay_and_stats_work() -> None:
    async def scene(world: World) -> None:
        a, b = await world.node("a", log=True), await world.node("b", log=True)

        @b.bus.serve("sum")
        async def add(request: zbus.Event) -> int:
            return sum(request.decode(list))

        await world.run(1.0)
        reply = await a.bus.request("sum", [1, 2, 3])
        assert reply.decode(int) == 6
        publisher = await a.bus.publisher("shop/a")
        await publisher.publish_many([b"1", b"2"])
        assert [event.payload async for event in a.bus.replay("shop/**")] == [b"1", b"2"]
        assert a.bus.stats()["published"] == 2
        assert {node.name for node in a.bus.nodes()} == {"a", "b"}
        await a.bus.put(zbus.Event(5, 0, 1, "shop/b", b"given"))
        assert await a.bus.head() == 3

    play(scene)


def test_a_world_needs_virtual_time() -> None:
    async def main() -> None:
        async with zbus.sim.world(seed=1):
            pass

    with pytest.raises(zbus.ZbusError, match=r"zbus\.sim\.run"):
        asyncio.run(main())


def test_a_scenario_that_never_ends_is_ended_with_the_place_where_it_waits() -> None:
    async def waits_for_nothing(world: World) -> None:
        await asyncio.Event().wait()

    with pytest.raises(WorldStuck, match="within 50 virtual seconds") as caught:
        play(waits_for_nothing, limit_s=50.0)
    assert "waits_for_nothing" in str(caught.value)


def test_an_exception_of_the_scenario_is_raised_with_the_seed() -> None:
    async def scene(world: World) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        play(scene)
    assert "seed 1" in caught.value.__notes__


def test_a_node_that_cannot_start_fails_the_scenario_with_its_own_error() -> None:
    async def scene(world: World) -> None:
        await world.node("a", log=True)
        await world.node("b", log="a.db")

    with pytest.raises(zbus.ConfigInvalid, match="log of node 'a'"):
        play(scene)

    async def twice(world: World) -> None:
        await world.node("a")
        await world.node("a")

    with pytest.raises(zbus.ConfigInvalid, match="a node 'a' already"):
        play(twice)


def test_clocks_may_differ_and_a_choice_comes_from_the_seed() -> None:
    async def scene(world: World) -> list[int]:
        a = await world.node("a", log=True, clock_ahead_s=30.0)
        b = await world.node("b", log=True)
        times = []
        for node in (a, b):
            await (await node.bus.publisher("shop/x")).publish(b"")
            assert node.disk is not None
            times.append(node.disk.rows[-1].published_at)
        assert 29e9 < times[0] - times[1] < 31e9
        assert world.choose("n", 1, 1000) == world.choose("n", 1, 1000) == world.choices["n"]
        return [world.choose(f"n{number}", 1, 1000) for number in range(5)]

    first, again = play(scene), play(scene)
    assert first == again
    assert len(set(first)) > 1

    async def smaller(world: World) -> tuple[int, int]:
        return world.choose("n", 5, 1000), world.choose("m", 5, 1000)

    assert play(smaller, overrides=Overrides(choices={"n": 2, "m": 7})) == (5, 7)


def test_records_are_in_the_trace_and_not_in_the_log_file(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(world: World) -> World:
        await world.node("a", log=True)
        return world

    with caplog.at_level(logging.DEBUG, "zbus"):
        world = play(scene, keep_trace=True)
    assert caplog.records == []
    assert any("BUS_STARTED" in step.values for step in world.trace.steps)
    assert logging.getLogger("zbus").disabled is False


def test_a_world_that_ended_leaves_nothing_in_memory() -> None:
    kept: list[weakref.ref[Any]] = []

    async def scene(world: World) -> None:
        await world.node("a", log=True, program=read)
        node = await world.node("b", log=True)
        kept.extend(weakref.ref(each) for each in (world, node.bus, world.nodes["a"].bus, node_of(node.bus)))
        publisher = await node.bus.publisher("shop/a")
        await publisher.publish(b"1")
        node.kill()
        world.nodes["a"].freeze()
        await world.run(1.0)

    play(scene)
    gc.collect()
    gc.collect()
    assert [reference() for reference in kept] == [None] * 4


def test_a_frozen_node_is_thawed_and_a_dead_one_started_before_the_end_is_checked() -> None:
    async def scene(world: World) -> None:
        a, b = await world.node("a", log=True), await world.node("b", log=True, program=read)
        await world.run(1.0)
        b.freeze()
        publisher = await a.bus.publisher("shop/a")
        await publisher.publish(b"1")
        a.kill()
        await world.run(5.0)

    play(scene)


def test_bridges_make_nodes_of_two_transports_reach_each_other() -> None:
    async def scene(world: World) -> None:
        await world.node("a", log=True, transport="sim://left")
        await world.node("b", log=True, transport="sim://right")
        assert not world.reaches("a", "b", "shop/x")
        await world.bridge("x", ("sim://left", "sim://right"), ["shop/**"], direction="forward", log=True)
        assert world.reaches("a", "b", "shop/x")
        assert not world.reaches("b", "a", "shop/x")
        assert not world.reaches("a", "b", "other/x")

    play(scene)


def test_until_waits_for_a_condition_and_gives_up() -> None:
    async def scene(world: World) -> None:
        await world.until(lambda: world.now > 3)
        assert 3 < world.now < 3.2
        with pytest.raises(WorldStuck, match="within 2 s"):
            await world.until(lambda: False, within_s=2)

    play(scene)


def test_overrides_survive_as_text_and_a_wrong_text_is_an_error() -> None:
    given = Overrides(faults=[], choices={"n": 2}, calm=True, shorter={3: 0.1})
    assert Overrides.parse(str(given)).__dict__ == given.__dict__
    for wrong in ("", "{", "[]", '{"other": 1}'):
        with pytest.raises(zbus.ConfigInvalid):
            Overrides.parse(wrong)


def test_a_failure_says_what_where_and_when() -> None:
    async def scene(world: World) -> None:
        node = await world.node("b", log=True, program=read)
        await world.run(1.0)
        world.ledger.acknowledged(node.name, (255, 3), "shop/x", world.now)

    with pytest.raises(InvariantBroken) as caught:
        play(scene, converge_s=5.0)
    (violation,) = caught.value.violations
    assert violation.node == "b"
    assert "event ff-3 on shop/x" in violation.what
    assert "'billing'" in violation.what
