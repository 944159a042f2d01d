"""Threads of a simulated process: executors, single calls, and drivers."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

import zbus.sim
from zbus.sim import WorldBoundary
from zbus.sim.machine.loop import Process
from zbus.sim.machine.runtime import WAKE_S, Clock, SimRuntime
from zbus.util.driver import RETRY_S


def simulated(process: Process | None = None, seed: int = 1) -> SimRuntime:
    loop: Any = asyncio.get_running_loop()
    return SimRuntime(loop, process or Process("a#1"), Clock(loop), Random(seed), 1, "host")


def test_one_worker_makes_calls_in_order_and_several_at_the_same_time() -> None:
    async def main(threads: int) -> tuple[list[int], float]:
        loop = asyncio.get_running_loop()
        executor, order = simulated().executor(threads, "name"), list[int]()
        results = await asyncio.gather(
            *[
                loop.run_in_executor(executor, lambda number=number: order.append(number) or number)
                for number in range(20)
            ]  # type: ignore[misc]
        )
        assert results == list(range(20))
        return order, loop.time()

    alone, alone_s = zbus.sim.run(main(1))
    many, many_s = zbus.sim.run(main(4))

    assert alone == list(range(20))
    assert many != alone
    assert sorted(many) == alone
    assert many_s < alone_s / 2


def test_a_call_gives_its_result_or_its_exception_after_a_moment() -> None:
    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        executor = simulated().executor(2, "name")
        found: list[Any] = [await loop.run_in_executor(executor, divmod, 7, 2)]
        found.append(loop.time() > 0)
        try:
            await loop.run_in_executor(executor, divmod, 7, 0)
        except ZeroDivisionError as error:
            found.append(repr(error))
        future = executor.submit(divmod, 9, 4)
        found.append(future.done())
        await asyncio.sleep(1)
        found.append(future.result(0))
        failed = executor.submit(divmod, 9, 0)
        await asyncio.sleep(1)
        found.append(type(failed.exception(0)))
        return found

    assert zbus.sim.run(main()) == [
        (3, 1), True, "ZeroDivisionError('integer division or modulo by zero')", False, (2, 1), ZeroDivisionError,
    ]  # fmt: skip


def test_a_call_that_no_thread_has_begun_can_be_cancelled_and_another_one_cannot() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        executor, made = simulated().executor(1, "name"), list[str]()
        first = loop.run_in_executor(executor, made.append, "first")
        second = loop.run_in_executor(executor, made.append, "second")
        third = loop.run_in_executor(executor, made.append, "third")
        await asyncio.sleep(0)
        assert first.cancel()  # a thread has begun with it
        assert second.cancel()
        await third
        assert not third.cancel()
        assert first.cancelled()
        return made

    assert zbus.sim.run(main()) == ["first", "third"]


@pytest.mark.parametrize("cancel", [False, True])
def test_the_end_of_an_executor_makes_the_calls_that_wait_or_cancels_them(cancel: bool) -> None:
    async def main() -> tuple[list[int], int]:
        executor, made = simulated().executor(1, "name"), list[int]()
        futures = [executor.submit(made.append, number) for number in range(3)]
        executor.shutdown(cancel_futures=cancel)
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(print)
        cancelled = sum(future.cancelled() for future in futures)
        await asyncio.sleep(5)
        return made, cancelled

    assert zbus.sim.run(main()) == (([0], 2) if cancel else ([0, 1, 2], 0))


def test_a_call_that_blocks_keeps_its_worker_busy() -> None:
    async def main() -> list[tuple[int, float]]:
        loop, runtime = asyncio.get_running_loop(), simulated()
        executor, made = runtime.executor(1, "name"), list[tuple[int, float]]()

        def call(number: int) -> None:
            made.append((number, loop.time()))
            if number == 1:
                runtime.block(10.0)

        await asyncio.gather(*[loop.run_in_executor(executor, call, number) for number in range(4)])
        return made

    found = zbus.sim.run(main())
    assert [number for number, _ in found] == [0, 1, 2, 3]
    assert found[1][1] < 1.0
    assert [at for _, at in found[2:]] == [10.0, 10.0]


def test_a_real_executor_is_refused_and_so_is_a_thread_outside_of_a_node() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(WorldBoundary, match="ThreadPoolExecutor"):
            loop.run_in_executor(executor, print)
        with pytest.raises(WorldBoundary, match="run_in_executor"):
            loop.run_in_executor(None, print)

    with ThreadPoolExecutor(1) as executor:
        zbus.sim.run(main())


def test_a_thread_runs_once_in_its_process() -> None:
    async def main() -> tuple[list[str], list[bool]]:
        process = Process("a#1")
        runtime, ran = simulated(process), list[str]()
        thread = runtime.thread(lambda: ran.append("ran"), "name")
        alive = [thread.is_alive()]
        thread.join(1)
        await asyncio.sleep(1)
        alive.append(thread.is_alive())
        runtime.thread(lambda: ran.append("never"), "name")
        process.kill()
        await asyncio.sleep(1)
        return ran, alive

    assert zbus.sim.run(main()) == (["ran"], [True, False])


class Steps:
    """A step for a driver: what it returns next, and when it was called."""

    def __init__(self, runtime: SimRuntime, *returns: float | Exception | None) -> None:
        self.returns = list(returns)
        self.times: list[float] = []
        self.errors: list[tuple[BaseException, float | None]] = []
        self.loop = runtime.loop
        self.driver = runtime.driver(self.step, "name", lambda error, pause_s: self.errors.append((error, pause_s)))

    def step(self) -> float | None:
        self.times.append(self.loop.time())
        given = self.returns.pop(0)
        if isinstance(given, Exception):
            raise given
        return given


def test_a_driver_calls_its_step_when_it_is_due_or_woken_until_it_has_ended() -> None:
    async def main() -> list[float]:
        steps = Steps(simulated(), 2.0, float("inf"), float("inf"), None)
        await asyncio.sleep(10)
        assert not steps.driver.join(0.0)
        steps.driver.wake()
        steps.driver.wake()
        await asyncio.sleep(10)
        assert steps.driver.join(0.0)
        steps.driver.wake()
        await asyncio.sleep(10)
        assert steps.errors == []
        return steps.times

    times = zbus.sim.run(main())
    assert len(times) == 4  # `join` calls the step that is due
    assert 0.0 <= times[0] <= WAKE_S
    assert times[1] == 2.0
    assert times[2] == 10.0
    assert 10.0 <= times[3] <= 10.0 + WAKE_S


def test_a_wake_up_during_a_step_is_not_lost() -> None:
    async def main() -> int:
        runtime, calls = simulated(), list[float]()

        def step() -> float:
            calls.append(runtime.loop.time())
            if len(calls) == 1:
                driver.wake()
            return float("inf")

        driver = runtime.driver(step, "name", lambda error, pause_s: pytest.fail("no step raises"))
        await asyncio.sleep(10)
        return len(calls)

    assert zbus.sim.run(main()) == 2


def test_a_driver_calls_a_step_that_raised_again_after_a_pause_even_if_it_is_woken() -> None:
    async def main() -> tuple[list[float], list[Any]]:
        error = ValueError("bad")
        steps = Steps(simulated(), error, error, float("inf"), error, None)
        await asyncio.sleep(0.001)
        steps.driver.wake()
        await asyncio.sleep(5)
        steps.driver.wake()
        await asyncio.sleep(5)
        return steps.times, steps.errors

    times, errors = zbus.sim.run(main())
    pauses = [pause_s for _, pause_s in errors]
    assert [str(error) for error, _ in errors] == ["bad"] * 3
    assert times[1] - times[0] == pytest.approx(pauses[0])
    assert times[2] - times[1] == pytest.approx(pauses[1])
    assert all(pause_s is not None and 0 < pause_s <= RETRY_S[1] for pause_s in pauses)
    assert pauses[1] > pauses[0]
    assert pauses[2] < pauses[1]  # it begins again after a step that went well
    assert len(times) == 5


def test_a_step_that_blocks_is_called_again_when_it_would_have_returned() -> None:
    async def main() -> list[float]:
        runtime, times = simulated(), list[float]()

        def step() -> float:
            times.append(runtime.loop.time())
            if len(times) == 1:
                runtime.block(runtime.loop.time() + 3.0)
                return 0.5
            return float("inf")

        driver = runtime.driver(step, "name", lambda error, pause_s: pytest.fail("no step raises"))
        await asyncio.sleep(1)
        driver.wake()
        await asyncio.sleep(10)
        return times

    times = zbus.sim.run(main())
    assert times[1] == pytest.approx(times[0] + 3.0)
    assert len(times) == 2
