"""What a user may do wrong is said in words: wrong arguments, files that cannot be imported, tasks that fail unseen."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import zbus
from zbus.errors import ConfigInvalid, ZbusError
from zbus.sim.errors import InvariantBroken
from zbus.sim.scenarios.scenario import load_scenarios
from zbus.sim.world import World


def play(scene: Callable[[World], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with zbus.sim.world(seed=1, **options) as world:
            return await scene(world)

    return zbus.sim.run(main())


async def _in_world(use: Any) -> None:
    async with zbus.sim.world(seed=1) as world:
        one, other = await world.node("one", log=True), await world.node("other")
        await use(world, one, other)


async def _waits(bus: zbus.Bus) -> None:
    await asyncio.Event().wait()


async def _is_async(*_: object) -> None: ...


async def _cut(world: Any, one: Any, other: Any) -> None:
    world.partition(one, other)


async def _add_invariant(world: Any, check: Any) -> None:
    world.invariant(check)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda world, one, other: world.run(seconds=-1), "not negative, not -1"),
        (lambda world, one, other: world.run(seconds=float("inf")), "not negative, not inf"),
        (lambda world, one, other: world.play(zbus.sim.ORDINARY, seconds=-1), "not negative, not -1"),
        (lambda world, one, other: world.play("kill", seconds=1), "must be zbus.sim.Faults"),
        (lambda world, one, other: world.until(False), "function without arguments"),
        (lambda world, one, other: world.until(_is_async), "not `async`"),
        (lambda world, one, other: world.node("third", program=5), "without calling it"),
        (lambda world, one, other: one.start(), "node one runs already"),
        (lambda world, one, other: _cut(world, one, one), "'one' cannot be cut off from itself"),
        (lambda world, one, other: _cut(world, "one", "other"), "returned, not 'one'"),
        (lambda world, one, other: _add_invariant(world, _is_async), "must not be `async`"),
    ],
)
def test_a_wrong_argument_is_named(use: Any, words: str) -> None:
    with pytest.raises((ZbusError, TypeError), match=words):
        zbus.sim.run(_in_world(use))


@pytest.mark.parametrize(
    "faults",
    [{"kill": "2"}, {"kill": -2}, {"kill": (5, 2)}, {"kill": 1.5}, {"drop": 5}, {"drop": (5,)}, {"for_s": (5, 1)}],
)
def test_wrong_faults_are_refused(faults: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(faults))):
        zbus.sim.Faults(**faults)


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(ConfigInvalid, match="seed: must be a whole number, not '7'"):
        zbus.sim.world(seed="7")  # type: ignore[arg-type]


def test_a_world_that_is_not_entered_says_so() -> None:
    async def main() -> None:
        await zbus.sim.world(seed=1).node("one")

    with pytest.raises(ZbusError, match="async with"):
        zbus.sim.run(main())


def test_an_exception_of_a_task_that_nobody_awaits_is_found() -> None:
    async def fails() -> None:
        raise ValueError("card rejected")

    async def program(bus: zbus.Bus) -> None:
        task = asyncio.create_task(fails())
        await _waits(bus)
        await task

    async def main() -> None:
        async with zbus.sim.world(seed=1) as world:
            await world.node("billing", program=program)
            await world.run(seconds=1)

    with pytest.raises(InvariantBroken, match=r"a task raised ValueError\('card rejected'\) at .*test_misuse.py:\d+"):
        zbus.sim.run(main())


def test_an_exception_of_a_program_names_its_line() -> None:
    async def program(bus: zbus.Bus) -> None:
        raise ValueError("card rejected")

    async def main() -> None:
        async with zbus.sim.world(seed=1) as world:
            await world.node("billing", program=program)
            await world.run(seconds=1)

    with pytest.raises(InvariantBroken, match=r"raised ValueError\('card rejected'\) at .*test_misuse.py:\d+"):
        zbus.sim.run(main())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import zbus\n1 / 0\n", r"ZeroDivisionError: division by zero at .*shop\.py:2"),
        ("import nosuchmodule\n", "ModuleNotFoundError: No module named 'nosuchmodule' at .*:1"),
        ("def (\n", "SyntaxError"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0 at .*:2"),
    ],
)
def test_a_file_that_cannot_be_imported_is_not_a_defect_of_zbus(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "shop.py").write_text(code)
    with pytest.raises(ConfigInvalid, match=f"cannot be imported: {words}"):
        load_scenarios(tmp_path / "shop.py")


def test_a_durable_subscription_that_a_program_stopped_reading_is_found() -> None:
    async def reads_one(bus: Any) -> None:
        async with bus.subscribe("shop/**", durable="billing") as subscription:
            await subscription.next()

    async def scene(world: World) -> None:
        await world.node("b", log=True, program=reads_one)
        node = await world.node("a", log=True)
        await world.run(1.0)
        await (await node.bus.publisher("shop/a")).publish_many([b"1", b"2", b"3"])

    with pytest.raises(InvariantBroken, match=r"never received 2 events, because nothing reads it any more"):
        play(scene, converge_s=10.0)


def test_a_durable_subscription_that_the_scenario_closes_is_owed_nothing() -> None:
    async def scene(world: World) -> None:
        node = await world.node("a", log=True)
        async with node.bus.subscribe("shop/**", durable="billing"):
            await world.run(1.0)
        await (await node.bus.publisher("shop/a")).publish(b"1")

    play(scene)


def test_a_slow_subscription_is_behind_and_has_lost_nothing() -> None:
    async def slowly(bus: Any) -> None:
        async with bus.subscribe("shop/**", durable="billing") as subscription:
            async for _ in subscription:
                await asyncio.sleep(1.0)

    async def scene(world: World) -> None:
        await world.node("b", log=True, program=slowly)
        node = await world.node("a", log=True)
        await world.run(1.0)
        await (await node.bus.publisher("shop/a")).publish_many([b"x"] * 50)

    with pytest.raises(InvariantBroken) as caught:
        play(scene, converge_s=10.0)
    (violation,) = caught.value.violations
    assert violation.invariant == "everything converges after the faults"
    assert "is behind by " in violation.what


def test_a_step_that_never_ends_is_ended_with_its_line(tmp_path: Path) -> None:
    program = tmp_path / "endless.py"
    program.write_text(
        "import zbus.sim\n"
        "from zbus.sim.machine import watchdog\n"
        "watchdog.STEP_S = 0.5\n"
        "async def endless(bus):\n"
        "    while True: pass\n"
        "async def main():\n"
        "    async with zbus.sim.world(seed=1) as world:\n"
        "        await world.node('a', program=endless)\n"
        "        await world.run(1)\n"
        "zbus.sim.run(main())\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert "a step did not end within 0.5 s of real time, at" in done.stderr
    assert "endless.py:5" in done.stderr


def test_a_real_bus_in_a_world_is_refused_with_the_line_that_opens_it() -> None:
    async def opens(bus: Any) -> None:
        async with zbus.open("memory"):
            pass

    async def scene(world: World) -> None:
        await world.node("a", program=opens)
        await world.run(1.0)

    with pytest.raises(
        InvariantBroken, match=r"test_misuse\.py:\d+, cannot be simulated: open a bus with `await world"
    ):
        play(scene)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda world: world.conditions(drop=5), "a probability between 0 and 1, not 5"),
        (lambda world: world.conditions(drop="10%"), "a probability between 0 and 1"),
        (lambda world: world.conditions(delay_s=1), "the shortest and the longest delay"),
        (lambda world: world.conditions(dropp=0.1), "known are: drop, duplicate, delay_s, bytes_per_s"),
        (lambda world: world.choose("n", 5, 2), "the smaller one first: 5, 2"),
        (lambda world: world.disconnect("zzz"), "must be what `await world.node"),
        (lambda world: world.isolate("zzz"), "must be what `await world.node"),
    ],
)
def test_a_wrong_condition_choice_or_node_is_named(use: Callable[[World], object], words: str) -> None:
    async def scene(world: World) -> None:
        await world.node("a")
        use(world)

    with pytest.raises(ConfigInvalid, match=re.escape(words)):
        play(scene)


def test_wrong_limits_and_a_function_in_place_of_a_coroutine_are_named() -> None:
    with pytest.raises(ConfigInvalid, match="converge_s"):
        World(1, converge_s=-1)

    async def scenario() -> None: ...

    with pytest.raises(TypeError, match=r"write zbus\.sim\.run\(scenario\(\)\)"):
        zbus.sim.run(scenario)  # type: ignore[arg-type]


def test_a_handler_that_always_fails_is_named() -> None:
    async def fails(bus: Any) -> None:
        @bus.on("shop/**", durable="billing")
        async def bill(event: zbus.Event) -> None:
            raise ValueError("card rejected")

        await asyncio.Event().wait()

    async def scene(world: World) -> None:
        await world.node("b", log=True, program=fails)
        node = await world.node("a", log=True)
        await world.run(1.0)
        await (await node.bus.publisher("shop/a")).publish_many([b"1", b"2", b"3"])

    with pytest.raises(InvariantBroken, match=r"EVENT_RETRY ValueError: card rejected"):
        play(scene, converge_s=10.0)
