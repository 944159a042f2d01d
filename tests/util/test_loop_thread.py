"""An event loop on a thread: work runs there, errors come back, and it ends in bounded time whatever hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from typing import ClassVar

import pytest

from zbus.util import loop_thread
from zbus.util.loop_thread import LoopEnded, LoopThread
from zbus.util.runtime import Runtime, Thread


@pytest.fixture
def made() -> Iterator[Callable[..., LoopThread]]:
    """Loops on threads that wait until they are to stop."""
    found: list[LoopThread] = []

    def make() -> LoopThread:
        async def main() -> None:
            await thread.stopping.wait()

        thread = LoopThread("zbus-test", main)
        found.append(thread)
        return thread

    yield make
    for each in found:
        assert each.stop(10.0)


@pytest.fixture
def thread(made: Callable[..., LoopThread]) -> LoopThread:
    found = made()
    found.start()
    return found


def test_its_threads_are_those_of_the_runtime() -> None:
    class Named(Runtime):
        names: ClassVar[list[str]] = []

        def executor(self, threads: int, name: str) -> Executor:
            self.names.append(name)
            return super().executor(threads, name)

        def thread(self, target: Callable[[], object], name: str) -> Thread:
            self.names.append(name)
            return super().thread(target, name)

    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    thread = LoopThread("zbus-test", main, Named())
    thread.start()

    assert thread.stop(10.0)
    assert Named.names == ["zbus-test", "zbus-test-worker"]


async def name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def fail() -> None:
    raise ValueError("on purpose")


def test_a_coroutine_runs_on_the_thread_and_returns_its_result(thread: LoopThread) -> None:
    assert thread.run(name()) == "zbus-test"


def test_an_error_of_a_coroutine_is_raised_where_it_was_awaited(thread: LoopThread) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        thread.run(fail())


def test_a_coroutine_that_takes_too_long_is_cancelled(thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        thread.run(hang(), 0.05)

    assert time.monotonic() - begun < 4.0
    assert cancelled.wait(10.0)


def test_posted_functions_are_called_in_order_on_the_thread(thread: LoopThread) -> None:
    called: list[tuple[int, bool]] = []
    for number in range(100):
        thread.post(lambda number: called.append((number, thread.is_current)), number)
    thread.run(asyncio.sleep(0))

    assert called == [(number, True) for number in range(100)]
    assert not thread.is_current


def test_a_loop_that_was_not_started_or_has_ended_runs_nothing(made: Callable[..., LoopThread]) -> None:
    thread = made()
    with pytest.raises(LoopEnded):
        thread.begin(name())
    thread.start()
    assert thread.stop(10.0)

    with pytest.raises(LoopEnded):
        thread.run(name())
    thread.post(print)
    assert thread.stop(10.0)
    assert not thread.alive


def test_work_that_is_left_at_the_end_is_cancelled_and_says_so(made: Callable[..., LoopThread]) -> None:
    thread, errors = made(), list[BaseException]()
    thread.start()
    begun, cancelled = threading.Event(), threading.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def wait() -> None:
        try:
            thread.run(hang())
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(10.0)
    assert thread.stop(10.0)
    waiting.join(10.0)

    assert [type(error) for error in errors] == [LoopEnded]
    assert cancelled.is_set()


def test_a_task_that_does_not_let_itself_be_cancelled_cannot_keep_the_thread(
    made: Callable[..., LoopThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_thread, "END_S", 0.05)
    thread, forever = made(), asyncio.Event()
    thread.start()

    async def stubborn() -> None:
        while True:
            try:
                await forever.wait()
            except asyncio.CancelledError:
                pass

    async def start() -> None:
        task = asyncio.create_task(stubborn())
        thread.stubborn = task  # type: ignore[attr-defined]  # or it would be collected
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    thread.run(start())
    begun = time.monotonic()

    assert thread.stop(10.0)
    assert time.monotonic() - begun < 5.0


def test_a_generator_that_was_left_half_way_is_closed(made: Callable[..., LoopThread]) -> None:
    thread, closed = made(), threading.Event()
    thread.start()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.set()

    left = numbers()

    async def first() -> int:
        return await anext(left)

    assert thread.run(first()) == 1
    assert thread.stop(10.0)

    assert closed.is_set()


def test_stop_returns_in_time_although_the_loop_is_blocked(made: Callable[..., LoopThread]) -> None:
    thread, released, blocked = made(), threading.Event(), threading.Event()
    thread.start()

    def block() -> None:
        blocked.set()
        released.wait(10.0)

    thread.post(block)
    assert blocked.wait(10.0)

    assert not thread.stop(0.05)
    assert thread.alive
    released.set()
    assert thread.stop(10.0)
