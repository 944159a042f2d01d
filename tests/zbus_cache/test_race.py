"""No interleaving of calls, events, slow loaders, errors and cancellations serves a stale value.

The model is a version for each key; each change publishes an event. A loader reads the version and returns it some
time later. A call must get at least the version of the last event that was delivered before the call.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zbus

KEYS = range(3)
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["call", "call", "call", "event", "read", "set", "remove"]), st.sampled_from(KEYS)),
    st.tuples(st.sampled_from(["finish", "finish", "fail", "cancel"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["event of all", "turn"]), st.just(0)),
)
Run = Callable[[Any], Any]


@pytest.fixture(scope="module")
def on_a_bus() -> Iterator[tuple[Run, zbus.Bus]]:
    with asyncio.Runner() as runner:
        bus = zbus.open()
        runner.run(bus.start())
        yield runner.run, bus
        runner.run(bus.aclose())


class Story:
    """One cache, the versions that it should return, and all calls."""

    def __init__(self, bus: zbus.Bus) -> None:
        self.bus = bus
        self.versions = dict.fromkeys(KEYS, 0)
        self.loading: list[asyncio.Future[None]] = []
        self.calls: list[tuple[asyncio.Task[int], int, int]] = []
        self.loaders: Counter[int] = Counter()

    async def load(self, key: int) -> int:
        version = self.versions[key]  # first, so that the value never looks newer than it is
        self.loaders[key] += 1
        go_on = asyncio.get_running_loop().create_future()
        self.loading.append(go_on)
        await go_on
        return version

    async def change(self, key: str, *changed: int) -> None:
        for each in changed:
            self.versions[each] += 1
        await (await self.bus.publisher(key)).publish(b"")

    async def run(self, operations: list[tuple[str, int]]) -> None:
        for what, number in operations:
            if what == "call":
                self.calls.append((asyncio.create_task(self.call(number)), number, self.versions[number]))
            elif what == "event":
                await self.change(f"events/{number}", number)
            elif what == "event of all":
                await self.change("all", *KEYS)
            elif what == "turn":
                await asyncio.sleep(0)
            elif what == "cancel" and number < len(self.calls):
                self.calls[number][0].cancel()
            elif what in ("finish", "fail") and number < len(self.loading):
                go_on = self.loading.pop(number)
                if not go_on.done():
                    go_on.set_result(None) if what == "finish" else go_on.set_exception(OSError("no"))
                await asyncio.sleep(0)
            else:
                self.more(what, number)
        await self.end()

    async def end(self) -> None:
        """Finish all loads: each result is recent enough, and no call is left waiting."""
        while any(not task.done() for task, _, _ in self.calls):
            for go_on in self.loading:
                if not go_on.done():
                    go_on.set_result(None)
            await asyncio.sleep(0)
        for task, key, owed in self.calls:
            if not task.cancelled() and task.exception() is None:
                assert task.result() >= owed, f"key {key}: {task.result()} was served although {owed} was delivered"
            elif not task.cancelled():
                assert isinstance(task.exception(), OSError)
        for key in KEYS:
            cached = self.read(key)
            assert cached is None or cached == self.versions[key], (
                f"key {key} has {cached} instead of {self.versions[key]}"
            )

    def more(self, what: str, number: int) -> None:
        if what == "read":
            cached = self.read(number)
            assert cached is None or cached >= self.versions[number]

    async def call(self, key: int) -> int:
        raise NotImplementedError

    def read(self, key: int) -> int | None:
        raise NotImplementedError


class OfACache(Story):
    def __init__(self, bus: zbus.Bus) -> None:
        super().__init__(bus)
        self.cache = bus.cache().invalidate_on("events/{id}", entry=lambda event: int(event.topic)).invalidate_on("all")

    async def call(self, key: int) -> int:
        found: int = await self.cache.load(key, self.load, key)
        return found

    def read(self, key: int) -> int | None:
        found: int | None = self.cache.get(key)
        return found

    def more(self, what: str, number: int) -> None:
        super().more(what, number)
        if what == "set":
            self.cache.set(number, self.versions[number])
        elif what == "remove":
            self.cache.remove(number)


class OfAFunction(Story):
    def __init__(self, bus: zbus.Bus) -> None:
        super().__init__(bus)

        @bus.cached(invalidate_on=["events/{key}", "all"])
        async def version(key: int) -> int:
            return await self.load(key)

        self.version, self.cache = version, version.cache

    async def call(self, key: int) -> int:
        return await self.version(key)

    def read(self, key: int) -> int | None:
        found: int | None = self.cache.get(key)
        return found

    def more(self, what: str, number: int) -> None:
        super().more(what, number)
        if what == "remove":
            self.cache.remove(number)


@pytest.mark.parametrize("kind", [OfACache, OfAFunction])
def test_no_call_after_an_event_gets_a_value_read_before_it(
    on_a_bus: tuple[Run, zbus.Bus], kind: type[OfACache | OfAFunction]
) -> None:
    run, bus = on_a_bus

    @settings(max_examples=150, deadline=None)
    @given(st.lists(OPERATIONS, max_size=40))
    def stories(operations: list[tuple[str, int]]) -> None:
        async def run_story() -> None:
            story = kind(bus)
            try:
                await story.run(operations)
                if all(what in ("call", "read", "turn", "finish") for what, _ in operations):
                    assert max(story.loaders.values(), default=1) == 1, "a key was loaded twice"
                assert not story.cache._loads  # type: ignore[attr-defined]
            finally:
                await story.cache.aclose()

        run(run_story())

    stories()
