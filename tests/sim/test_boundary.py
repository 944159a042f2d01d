"""The boundary of a world: what code in it may ask of the machine, and that other threads notice nothing of it."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import zbus.sim
from zbus.sim import World, WorldBoundary
from zbus.sim.machine.boundary import outside


def in_world(scene: Callable[[World], Awaitable[Any]], seed: int = 1) -> Any:
    async def main() -> Any:
        async with zbus.sim.world(seed=seed) as world:
            return await scene(world)

    return zbus.sim.run(main())


REFUSED: dict[str, Callable[[], Any]] = {
    "time.sleep": lambda: time.sleep(0.0),
    "a thread": lambda: threading.Thread(target=print).start(),
    "a timer": lambda: threading.Timer(1.0, print).start(),
    "a socket": lambda: socket.socket(),
    "a connection": lambda: socket.create_connection(("127.0.0.1", 9)),
    "a process": lambda: subprocess.run([sys.executable, "-c", ""], check=False),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_cannot_be_simulated_is_refused_with_the_name_of_the_caller(what: str) -> None:
    async def scene(world: World) -> None:
        REFUSED[what]()

    with pytest.raises(WorldBoundary) as caught:
        in_world(scene)
    line = REFUSED[what].__code__.co_firstlineno
    assert caught.value.caller == f"{__file__}:{line}"
    assert caught.value.instead
    assert caught.value.caller in str(caught.value)


@pytest.mark.parametrize("name", ["create_connection", "create_server", "add_reader", "subprocess_exec", "getaddrinfo"])
def test_the_loop_has_no_network_and_no_processes(name: str) -> None:
    async def main() -> None:
        getattr(asyncio.get_running_loop(), name)()

    with pytest.raises(WorldBoundary, match=name):
        zbus.sim.run(main())


def test_streams_and_subprocesses_of_asyncio_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(WorldBoundary):
            await asyncio.open_connection("127.0.0.1", 9)
        with pytest.raises(WorldBoundary):
            await asyncio.create_subprocess_exec(sys.executable)
        with pytest.raises(WorldBoundary):
            asyncio.get_running_loop().run_forever()
        with pytest.raises(WorldBoundary):
            asyncio.get_running_loop().stop()

    zbus.sim.run(main())


def drawn() -> list[Any]:
    """What a program may ask of the machine by chance."""
    return [
        random.random(),
        random.randrange(1 << 60),
        random.choice(range(1000)),
        random.sample(range(1000), 5),
        random.Random().random(),
        random.SystemRandom().random(),
        secrets.token_hex(16),
        secrets.randbits(60),
        secrets.choice(range(1 << 30)),
        os.urandom(16),
        uuid.uuid4(),
    ]


def test_chance_comes_from_the_seed_in_a_world() -> None:
    async def scene(world: World) -> list[Any]:
        found = drawn()
        await world.run(1)
        return [*found, *drawn()]

    first, second, other = in_world(scene, 1), in_world(scene, 1), in_world(scene, 2)

    assert first == second
    assert all(one != another for one, another in zip(first, other, strict=True))
    assert all(one != another for one, another in zip(first[:11], first[11:], strict=True))


def test_chance_is_real_outside_of_a_world_and_after_it() -> None:
    async def scene(world: World) -> list[Any]:
        return drawn()

    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    before = random.random()
    in_world(scene)
    after = [random.random() for _ in range(2)]

    assert [before, *after] == expected
    assert all(one != another for one, another in zip(drawn()[4:], drawn()[4:], strict=True))


def clocks() -> list[float]:
    return [time.time(), time.time_ns() / 1e9, time.monotonic(), time.monotonic_ns() / 1e9, time.perf_counter(),
            time.perf_counter_ns() / 1e9]  # fmt: skip


def test_clocks_are_those_of_the_world_in_it_and_real_outside() -> None:
    async def scene(world: World) -> tuple[list[float], list[float], float]:
        first = clocks()
        await world.run(100)
        return first, clocks(), world.now

    real = clocks()
    first, second, now = in_world(scene)
    after = clocks()

    assert [later - earlier for earlier, later in zip(first, second, strict=True)] == [pytest.approx(100.0)] * 6
    assert second[2:] == [pytest.approx(now)] * 4
    assert in_world(scene)[0] == first
    assert all(0 <= later - earlier < 60 for earlier, later in zip(real, after, strict=True))


class Other:
    """Another thread of this process, which runs before, during and after a world."""

    def __init__(self) -> None:
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._ends, self.found = False, list[Any]()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._asked.acquire() and not self._ends:
            self.found.append((clocks(), drawn()))
            time.sleep(0.0)
            threading.Thread(target=print, args=("",), kwargs={"end": ""}).start()
            socket.socket().close()
            self._answered.release()

    def ask(self) -> None:
        self._asked.release()
        assert self._answered.acquire(timeout=20), "the other thread failed"

    def end(self) -> None:
        self._ends = True
        self._asked.release()
        self._thread.join(20)


def test_other_threads_have_the_real_machine_and_do_not_disturb_the_world() -> None:
    other = Other()

    async def scene(world: World) -> list[Any]:
        found = drawn()
        other.ask()
        await world.run(1000)
        return [*found, *drawn()]

    async def alone(world: World) -> list[Any]:
        found = drawn()
        await world.run(1000)
        return [*found, *drawn()]

    try:
        before = clocks()
        first, second = in_world(scene), in_world(scene)
        after = clocks()
    finally:
        other.end()

    assert first == second == in_world(alone)
    assert len(other.found) == 2
    for found, _ in other.found:
        assert all(low <= each <= high for low, each, high in zip(before, found, after, strict=True))
    assert all(one != another for one, another in zip(other.found[0][1], other.found[1][1], strict=True))


def test_everything_is_as_before_after_a_world_that_failed() -> None:
    names = [(time, "time"), (time, "sleep"), (os, "urandom"), (random, "random"), (random.Random, "seed"),
             (threading.Thread, "start"), (socket.socket, "__init__"), (subprocess.Popen, "__init__")]  # fmt: skip
    before = [getattr(owner, name) for owner, name in names]
    state = random.getstate()

    async def scene(world: World) -> None:
        assert [getattr(owner, name) for owner, name in names] != before
        raise KeyError("failed")

    with pytest.raises(KeyError):
        in_world(scene)

    assert [getattr(owner, name) for owner, name in names] == before
    assert random.getstate() == state


def test_the_simulator_itself_may_use_the_machine_and_the_world_does_not_notice_it() -> None:
    async def scene(world: World) -> tuple[list[Any], list[float], list[Any]]:
        before = drawn()
        with outside():
            found, now = drawn(), clocks()
            time.sleep(0.0)
            thread = threading.Thread(target=print, args=("",), kwargs={"end": ""})
            thread.start()
            thread.join(20)
        with pytest.raises(WorldBoundary):
            time.sleep(0.0)
        return found, now, [*before, *drawn()]

    async def alone(world: World) -> list[Any]:
        return [*drawn(), *drawn()]

    before = clocks()
    (first, now, inside), (second, _, again) = in_world(scene), in_world(scene)
    after = clocks()

    assert all(one != another for one, another in zip(first, second, strict=True))
    assert all(low <= each <= high for low, each, high in zip(before, now, after, strict=True))
    assert inside == again == in_world(alone)
