"""The event loop of the simulator: order, virtual time, exceptions, runs that never end, and processes."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from loop_programs import PROGRAMS, Program, kept

import zbus.sim
from zbus.sim import InvariantBroken, SimLoop, WorldStuck
from zbus.sim.ledger import NO_EXCEPTION
from zbus.sim.machine import loop as loop_module
from zbus.sim.machine.loop import CLEANUP_S, Process


@pytest.mark.parametrize("program", PROGRAMS, ids=[each.__name__ for each in PROGRAMS])
def test_a_program_takes_the_same_steps_as_on_the_standard_loop(program: Program) -> None:
    real: list[object] = []
    simulated: list[object] = []
    asyncio.run(program(real.append))
    zbus.sim.run(program(simulated.append))
    kept.clear()

    assert simulated == real
    assert len(real) >= 3


def test_tasks_that_a_scenario_left_clean_up() -> None:
    steps: list[str] = []

    async def background(name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(3600)
        finally:
            steps.append(f"{name} ends at {loop.time():g}")
            await asyncio.sleep(1)
            steps.append(f"{name} has ended at {loop.time():g}")

    async def main() -> None:
        tasks = [asyncio.create_task(background(name)) for name in "ab"]
        await asyncio.sleep(1)
        steps.append(f"{len(tasks)} tasks are left")

    zbus.sim.run(main())

    assert steps == ["2 tasks are left", "a ends at 1", "b ends at 1", "a has ended at 2", "b has ended at 2"]


def test_a_program_takes_the_same_steps_each_time_and_virtual_time_only() -> None:
    def steps() -> list[object]:
        found: list[object] = []

        async def main() -> float:
            for program in PROGRAMS:
                await program(found.append)
            await asyncio.sleep(3600)
            return asyncio.get_running_loop().time()

        found.append(zbus.sim.run(main()))
        kept.clear()
        return found

    began = time.monotonic()
    first = steps()

    assert first == steps()
    assert first[-1] > 3600
    assert time.monotonic() - began < 60


# Time and order.


def test_time_jumps_to_the_next_timer_and_equal_times_keep_the_order_of_creation() -> None:
    found: list[tuple[object, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for name, when in (("a", 5.0), ("b", 2.0), ("c", 5.0), ("d", 2.0)):
            loop.call_at(when, lambda name=name: found.append((name, loop.time())))  # type: ignore[misc]
        loop.call_at(2.0, lambda: loop.call_soon(lambda: found.append(("soon after", loop.time()))))
        await asyncio.sleep(10)

    zbus.sim.run(main())

    assert found == [("b", 2.0), ("d", 2.0), ("soon after", 2.0), ("a", 5.0), ("c", 5.0)]


def test_a_time_that_has_passed_is_now() -> None:
    async def main() -> tuple[float, list[float]]:
        loop, found = asyncio.get_running_loop(), list[float]()
        await asyncio.sleep(5)
        loop.call_at(1.0, lambda: found.append(loop.time()))
        loop.call_later(-3.0, lambda: found.append(loop.time()))
        await asyncio.sleep(1)
        return loop.time(), found

    assert zbus.sim.run(main()) == (6.0, [5.0, 5.0])


def test_a_timer_that_was_cancelled_does_not_let_time_pass() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(100, lambda: None).cancel()
        try:
            await asyncio.Event().wait()
        finally:
            found.append(loop.time())
        return 0.0

    found: list[float] = []
    with pytest.raises(WorldStuck):
        zbus.sim.run(main())
    assert found == [0.0]


def test_a_handle_has_its_time() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(2)
        return loop.call_soon(print).when(), loop.call_later(3, print).when()  # type: ignore[attr-defined]

    assert zbus.sim.run(main()) == (2.0, 5.0)


def test_a_loop_runs_once_and_not_inside_of_another() -> None:
    async def inside() -> None:
        coroutine = asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="running event loop"):
            zbus.sim.run(coroutine)
        coroutine.close()

    asyncio.run(inside())
    loop = SimLoop()  # type: ignore[abstract]
    loop.close()
    coroutine = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_until_complete(coroutine)
    coroutine.close()
    assert loop.is_closed()
    assert not loop.is_running()


# Exceptions.


def test_the_exception_of_a_callback_ends_the_run() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        try:
            await asyncio.sleep(10)
        finally:
            cleaned.append("cleaned up")

    with pytest.raises(ZeroDivisionError):
        zbus.sim.run(main())
    assert cleaned == ["cleaned up"]


def test_the_exception_of_a_task_that_was_not_awaited_is_raised_at_the_end() -> None:
    async def fail() -> None:
        raise LookupError("nobody looks")

    async def main() -> None:
        tasks.append(asyncio.create_task(fail(), name="lonely"))
        for _ in range(2000):  # tasks that have ended are removed at times; this one must not be
            await asyncio.create_task(asyncio.sleep(0))
        await asyncio.sleep(5)
        found.append("went on")

    found: list[str] = []
    tasks: list[Any] = []
    with pytest.raises(LookupError) as caught:
        zbus.sim.run(main())
    assert found == ["went on"]
    assert "lonely" in caught.value.__notes__[0]


def test_an_exception_handler_gets_what_no_caller_gets() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        found: list[str] = []
        loop.set_exception_handler(
            lambda loop, context: found.append(f"{context['message']}: {context['exception']!r}")
        )
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)
        return found

    (found,) = zbus.sim.run(main())
    assert found.endswith("ZeroDivisionError('integer division or modulo by zero')")
    assert "lambda" in found


def test_a_task_of_a_node_that_fails_breaks_an_invariant_although_nothing_awaits_it() -> None:
    async def program(bus: Any) -> None:
        async def fail() -> None:
            raise LookupError("nobody looks")

        tasks.append(asyncio.create_task(fail()))
        await asyncio.sleep(60)

    async def main() -> None:
        async with zbus.sim.world() as world:
            await world.node("a", program=program)
            await world.run(5)

    tasks: list[Any] = []
    with pytest.raises(InvariantBroken) as caught:
        zbus.sim.run(main())
    (violation,) = caught.value.violations
    assert (violation.invariant, violation.node) == (NO_EXCEPTION, "a")
    assert "nobody looks" in violation.what


# Runs that would never end.


async def wait_for_nothing() -> None:
    await asyncio.Event().wait()


def test_a_deadlock_is_an_error_that_says_where_the_scenario_waits() -> None:
    async def main() -> None:
        try:
            await asyncio.sleep(3)
            await wait_for_nothing()
        finally:
            cleaned.append("cleaned up")

    cleaned: list[str] = []
    with pytest.raises(WorldStuck, match="nothing is scheduled") as caught:
        zbus.sim.run(main())
    assert "wait_for_nothing" in caught.value.waiting
    assert f"{__file__}:" in caught.value.waiting
    assert caught.value.waiting in str(caught.value)
    assert cleaned == ["cleaned up"]


@pytest.mark.parametrize("ends", ["swallows", "raises", "waits again", "never ends"])
def test_a_scenario_that_is_stuck_fails_whatever_it_does_about_it(ends: str) -> None:
    async def main() -> str:
        try:
            await wait_for_nothing()
        except asyncio.CancelledError:
            if ends == "raises":
                raise KeyError("cleaning up") from None
            if ends == "waits again":
                await wait_for_nothing()
            while ends == "never ends":
                times.append(asyncio.get_running_loop().time())
                await asyncio.sleep(1)
        return "a result"

    times = [0.0]
    with pytest.raises(WorldStuck, match="nothing is scheduled") as caught:
        zbus.sim.run(main())
    assert isinstance(caught.value.__cause__, KeyError) == (ends == "raises")
    assert max(times) <= 2 * CLEANUP_S + 1  # it was asked to end twice


def test_a_scenario_has_so_much_virtual_time_and_then_time_to_clean_up() -> None:
    async def main() -> None:
        async with zbus.sim.world(seed=3, limit_s=100.0) as world:
            try:
                while True:
                    await world.run(1)
            finally:
                times.append(world.now)
                await asyncio.sleep(CLEANUP_S / 2)
                times.append(world.now)

    times: list[float] = []
    with pytest.raises(WorldStuck, match="did not end within 100 virtual seconds") as caught:
        zbus.sim.run(main())
    assert times == [pytest.approx(101.0), pytest.approx(101.0 + CLEANUP_S / 2)]
    assert caught.value.__notes__ == ["seed 3"]


@pytest.mark.parametrize("kind", ["soon", "later", "sleep"])
def test_callbacks_that_schedule_each_other_for_ever_are_an_error(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(loop_module, "STANDSTILL_STEPS", 1000)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_soon(again) if kind == "soon" else loop.call_later(0, again)

        await asyncio.sleep(2.5)
        if kind != "sleep":
            again()
        while kind == "sleep":
            await asyncio.sleep(0)
        await asyncio.sleep(1)

    with pytest.raises(WorldStuck, match=r"time stands still at 2\.5") as caught:
        zbus.sim.run(main())
    assert "main" in caught.value.waiting


def test_many_callbacks_are_no_standstill_while_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "STANDSTILL_STEPS", 1000)

    async def main() -> None:
        for _ in range(5000):
            await asyncio.sleep(0.001)

    zbus.sim.run(main())


# Processes.


def in_process(process: Process, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine, context=process.context.copy())


def test_a_killed_process_runs_no_finally_block_and_nothing_that_it_scheduled() -> None:
    steps: list[str] = []
    processes: list[Process] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(5, steps.append, "its timer")
        child = asyncio.create_task(asyncio.sleep(5))
        child.add_done_callback(lambda task: steps.append("its callback"))
        try:
            async with asyncio.timeout(4):
                while True:
                    steps.append("works")
                    await asyncio.sleep(1)
        except BaseException:
            steps.append("its except block")
            raise
        finally:
            steps.append("its finally block")

    async def main() -> list[str]:
        process = Process("a#1")
        processes.append(process)
        task = in_process(process, work())
        await asyncio.sleep(2.5)
        process.kill()
        task.cancel()  # a dead process cannot be asked for anything
        await asyncio.sleep(60)
        with pytest.raises(RuntimeError, match="a#1 was killed"):
            process.check()
        return list(steps)

    found = zbus.sim.run(main())

    assert found == ["works", "works", "works"]
    assert steps == found
    (process,) = processes
    assert not process.alive
    for task in process.tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_frozen_process_continues_where_it_was_and_its_timers_fire_late_and_in_order() -> None:
    steps: list[tuple[str, float]] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for name, delay_s in (("third", 3.0), ("second", 2.0), ("fourth", 3.0), ("after the thaw", 20.0)):
            loop.call_later(delay_s, lambda name=name: steps.append((name, loop.time())))  # type: ignore[misc]
        timer = loop.call_later(2.5, steps.append, ("before its cancellation", 0.0))
        loop.call_later(6.0, timer.cancel)
        try:
            async with asyncio.timeout(4.0):
                await asyncio.sleep(100)
        except TimeoutError:
            steps.append(("timeout", loop.time()))

    async def main() -> None:
        process, other = Process("a#1"), Process("b#1")
        task = in_process(process, work())
        in_process(other, tick())
        await asyncio.sleep(1)
        process.freeze()
        process.freeze()
        await asyncio.sleep(9)
        before = [name for name, _ in steps]
        process.thaw(asyncio.get_running_loop())  # type: ignore[arg-type]
        process.thaw(asyncio.get_running_loop())  # type: ignore[arg-type]
        await task
        await asyncio.sleep(20)
        assert before == ["tick"] * 5

    async def tick() -> None:
        for _ in range(5):
            await asyncio.sleep(1)
            steps.append(("tick", asyncio.get_running_loop().time()))

    zbus.sim.run(main())

    own = [step for step in steps if step[0] != "tick"]
    assert own == [
        ("second", 10.0),
        ("before its cancellation", 0.0),
        ("third", 10.0),
        ("fourth", 10.0),
        ("timeout", 10.0),
        ("after the thaw", 20.0),
    ]


def test_a_frozen_process_can_be_killed() -> None:
    steps: list[str] = []

    async def work() -> None:
        await asyncio.sleep(1)
        steps.append("never")

    async def main() -> Process:
        process = Process("a#1")
        in_process(process, work())
        await asyncio.sleep(0)
        process.freeze()
        process.kill()
        process.thaw(asyncio.get_running_loop())  # type: ignore[arg-type]
        await asyncio.sleep(5)
        return process

    process = zbus.sim.run(main())
    assert steps == []
    for task in process.tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_task_of_a_process_that_was_killed_before_its_first_step_leaves_no_warning() -> None:
    async def program(bus: Any) -> None:
        raise AssertionError("it never runs")

    async def main() -> None:
        async with zbus.sim.world() as world:
            node = await world.node("a")
            node.also(program)
            node.kill()
            node.programs.clear()

    zbus.sim.run(main())
    gc.collect()
