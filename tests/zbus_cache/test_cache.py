"""`bus.cache`: storing, invalidating and loading entries, and rejected options."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from inside import node_of

import zbus
from zbus.ports.cache import Cache


@pytest.fixture
async def bus() -> AsyncIterator[zbus.Bus]:
    async with zbus.open() as bus:
        yield bus


async def publish(bus: zbus.Bus, key: str, payload: Any = b"") -> None:
    await (await bus.publisher(key)).publish(payload)


class Loader:
    """Returns the number of its calls once it is released."""

    def __init__(self) -> None:
        self.calls = self.cancelled = 0
        self.begun = asyncio.Event()
        self.let_go = asyncio.Event()

    async def __call__(self) -> int:
        self.calls += 1
        number = self.calls
        self.begun.set()
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return number


async def free(value: Any = 1) -> Any:
    return value


# Storing.


async def test_a_loaded_value_is_read_without_waiting_until_it_is_removed(bus: zbus.Bus) -> None:
    cache = bus.cache()
    assert cache.get("a") is None
    assert await cache.load("a", free, "one") == "one"
    assert cache.get("a") == "one"
    assert await cache.load("a", free, "two") == "one"
    cache.remove("a")
    assert cache.get("a", "nothing") == "nothing"
    cache.set("a", None)
    assert cache.get("a", "nothing") is None
    cache.clear()
    assert cache.get("a", "nothing") == "nothing"


async def test_a_plain_loader_runs_on_a_thread_and_does_not_block_the_loop(bus: zbus.Bus) -> None:
    cache, loop_thread, release = bus.cache(), threading.current_thread(), threading.Event()

    def block(word: str) -> tuple[str, bool]:
        assert release.wait(20)
        return word, threading.current_thread() is loop_thread

    loading = asyncio.create_task(cache.load("a", block, "x"))
    await asyncio.sleep(0.01)
    release.set()
    assert await loading == ("x", False)
    assert await cache.load("b", lambda: free("made by a lambda")) == "made by a lambda"


async def test_a_cache_that_is_full_evicts_and_counts_it(bus: zbus.Bus) -> None:
    cache = bus.cache(capacity=10)
    for number in range(100):
        cache.set(number, number)
    stats = cache.stats()
    assert (stats["entries"], stats["evictions"]) == (10, 90)


@pytest.mark.parametrize("limit", ["ttl", "tti"])
async def test_an_expired_entry_is_evicted_and_counted(bus: zbus.Bus, limit: str) -> None:
    cache = bus.cache(**{limit: 0.05})  # type: ignore[arg-type]
    cache.set("a", 1)
    assert cache.get("a") == 1
    deadline = time.monotonic() + 10
    while cache.stats()["entries"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert cache.get("a") is None
    assert cache.stats()["evictions"] == 1


async def test_an_entry_that_is_used_outlives_its_idle_time(bus: zbus.Bus) -> None:
    cache = bus.cache(tti=1.0)
    cache.set("a", 1)
    begin = time.monotonic()
    while time.monotonic() < begin + 1.5:
        assert cache.get("a") == 1
        await asyncio.sleep(0.05)


# Invalidating.


@pytest.mark.parametrize("log", [None, "memory", "file"])
async def test_when_publish_returns_the_entry_is_invalidated(log: str | None, log_path: Path) -> None:
    async with zbus.open(log_path if log == "file" else log) as bus:
        cache = bus.cache().invalidate_on("events/Todo/**").invalidate_on("events/User/*")
        publisher = await bus.publisher("events/Todo/7")
        for word in ("one", "two"):
            assert await cache.load("a", free, word) == word
            await publisher.publish(b"")
            assert cache.get("a") is None
        await cache.load("a", free, "three")
        await publisher.publish_many([b""] * 10)
        assert cache.get("a") is None
        await cache.load("a", free, "four")
        await publish(bus, "events/Other/7")
        assert cache.get("a") == "four"
        await publish(bus, "events/User/7")
        assert cache.get("a") is None
        assert cache.stats()["invalidations"] == 13


async def test_only_the_entry_that_the_event_names_is_invalidated(bus: zbus.Bus) -> None:
    by_key = bus.cache().invalidate_on("events/Todo-{id}/*/{lang}/**", entry="{lang}/{id}")
    by_event = bus.cache().invalidate_on("events/**", entry=lambda event: event.decode(dict)["id"])
    for cache in (by_key, by_event):
        cache.set("en/7", 1)
        cache.set("de/7", 2)
    await publish(bus, "events/Todo-7/x/en/y/z", {"id": "de/7"})
    assert (by_key.get("en/7"), by_key.get("de/7")) == (None, 2)
    assert (by_event.get("en/7"), by_event.get("de/7")) == (1, None)


@pytest.mark.parametrize(
    ("key_of", "reported"), [(lambda event: 1 / 0, 1), (lambda event: [], 1), (lambda event: None, 0)]
)
async def test_if_the_entry_is_unknown_all_are_invalidated_and_delivery_continues(
    bus: zbus.Bus, key_of: Any, reported: int
) -> None:
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    cache = bus.cache().invalidate_on("a/**", entry=key_of)
    async with bus.subscribe("a/**") as subscription:
        cache.set("x", 1)
        await publish(bus, "a/b")
        assert cache.get("x") is None
        assert (await anext(subscription)).key == "a/b"
    assert len(contexts) == reported


async def test_permanently_lost_events_invalidate_all_entries(bus: zbus.Bus) -> None:
    cache = bus.cache().invalidate_on("events/{id}", entry="{id}")
    cache.set("7", 1)
    assert node_of(bus).network is not None
    node_of(bus).network.inbox.report_gap(1, "events/8", 5, 3)
    assert cache.get("7") is None


async def test_a_load_that_began_before_the_event_is_neither_stored_nor_joined(bus: zbus.Bus) -> None:
    cache, loader = bus.cache().invalidate_on("events/{id}", entry="{id}"), Loader()
    before = asyncio.create_task(cache.load("7", loader))
    await loader.begun.wait()
    await publish(bus, "events/7")
    after = asyncio.create_task(cache.load("7", loader))
    await asyncio.sleep(0)
    loader.let_go.set()
    assert (await before, await after) == (1, 2)
    assert cache.get("7") == 2
    assert loader.calls == 2


async def test_a_value_set_during_a_load_is_not_overwritten_by_it(bus: zbus.Bus) -> None:
    cache, loader = bus.cache(), Loader()
    loading = asyncio.create_task(cache.load("a", loader))
    await loader.begun.wait()
    cache.set("a", "newer")
    loader.let_go.set()
    assert await loading == 1
    assert cache.get("a") == "newer"


async def test_a_reader_of_another_process_log_invalidates_entries(log_path: Path) -> None:
    async with zbus.open(log_path) as owner, zbus.open(log_path, read_only=True) as reader:
        cache = reader.cache().invalidate_on("events/{id}", entry="{id}")
        await cache.load("7", free)
        await cache.load("8", free)
        await publish(owner, "events/7")
        async with asyncio.timeout(20):
            while cache.get("7") is not None:
                await asyncio.sleep(0.01)
        assert cache.get("8") == 1


async def test_a_reader_that_can_no_longer_follow_serves_nothing_and_raises_the_cause(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with zbus.open(log_path) as owner, zbus.open(log_path, read_only=True) as reader:
        cache = reader.cache().invalidate_on("events/**")
        await cache.load("a", free)

        def fail(*_: Any) -> Any:
            raise zbus.LogTrimmed(1, 2)

        assert node_of(reader).log is not None
        monkeypatch.setattr(node_of(reader).log, "read", fail)
        await publish(owner, "events/7")
        async with asyncio.timeout(20):
            while cache.get("a") is not None:
                await asyncio.sleep(0.01)
        with pytest.raises(zbus.LogTrimmed):
            await cache.load("a", free)


# Loading once.


async def test_concurrent_misses_load_once(bus: zbus.Bus) -> None:
    cache, loader = bus.cache(), Loader()
    callers = [asyncio.create_task(cache.load("a", loader)) for _ in range(50)]
    await loader.begun.wait()
    callers += [asyncio.create_task(cache.load("a", loader)) for _ in range(50)]
    await asyncio.sleep(0)
    loader.let_go.set()
    assert await asyncio.gather(*callers) == [1] * 100
    stats = cache.stats()
    assert (stats["loads"], stats["misses"], stats["hits"]) == (1, 100, 0)


@pytest.mark.parametrize("plain", [False, True])
async def test_every_waiter_gets_the_error_of_the_loader_and_the_next_call_loads_again(
    bus: zbus.Bus, plain: bool
) -> None:
    cache, error = bus.cache(), KeyError("no such todo")

    async def fail() -> int:
        await asyncio.sleep(0)
        raise error

    def fail_on_a_thread() -> int:
        raise error

    got = await asyncio.gather(
        *[cache.load("a", fail_on_a_thread if plain else fail) for _ in range(3)], return_exceptions=True
    )
    assert all(each is error for each in got)
    assert cache.get("a") is None
    assert await cache.load("a", free, "again") == "again"
    stats = cache.stats()
    assert (stats["loads"], stats["load_errors"]) == (2, 1)


async def test_a_plain_loader_that_raises_stop_iteration_does_not_hang(bus: zbus.Bus) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await bus.cache().load("a", lambda: next(iter(())))


async def test_a_cancelled_caller_does_not_cancel_the_load_of_others(bus: zbus.Bus) -> None:
    cache, loader = bus.cache(), Loader()
    first, second = (asyncio.create_task(cache.load("a", loader)) for _ in range(2))
    await loader.begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    loader.let_go.set()
    assert await second == 1
    assert loader.cancelled == 0


async def test_the_last_caller_to_be_cancelled_cancels_the_load_and_no_caller_joins_it(bus: zbus.Bus) -> None:
    cache, loader, cleaned_up = bus.cache(), Loader(), asyncio.Event()

    async def load() -> int:
        try:
            return await loader()
        finally:
            await cleaned_up.wait()

    callers = [asyncio.create_task(cache.load("a", load)) for _ in range(3)]
    await loader.begun.wait()
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    again = asyncio.create_task(cache.load("a", load))
    await asyncio.sleep(0)
    loader.let_go.set()
    cleaned_up.set()
    assert await again == 2
    assert loader.cancelled == 1
    assert cache.get("a") == 2


async def test_a_loader_that_cancels_itself_is_an_error_and_not_a_cancellation(bus: zbus.Bus) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(zbus.ZbusError, match="cancelled itself"):
        await bus.cache().load("a", give_up)


async def test_a_loader_that_loads_its_own_key_is_an_error(bus: zbus.Bus) -> None:
    cache = bus.cache()

    async def load_itself() -> Any:
        return await cache.load("a", load_itself)

    async with asyncio.timeout(20):
        with pytest.raises(zbus.ZbusError, match="wait for itself"):
            await cache.load("a", load_itself)


# Lifecycle and statistics.


async def test_the_counters_are_in_the_statistics_of_the_bus_by_name(bus: zbus.Bus) -> None:
    assert "caches" not in bus.stats()
    cache = bus.cache(name="todos").invalidate_on("events/**")
    unnamed = [bus.cache(), bus.cache()]
    await cache.load("a", free)
    cache.get("a")
    cache.get("b")
    await publish(bus, "events/x")
    found = bus.stats()["caches"]
    expected = {"hits": 1, "misses": 2, "loads": 1, "load_errors": 0, "invalidations": 1, "evictions": 0, "entries": 0}
    assert found["todos"] == expected
    assert [each.name for each in unnamed] == ["cache", "cache-2"]
    assert found.keys() == {"todos", "cache", "cache-2"}
    await cache.aclose()
    await cache.aclose()
    assert "todos" not in bus.stats()["caches"]
    bus.cache(name="todos")


async def test_a_cache_made_before_the_bus_opens_works_once_it_is_open() -> None:
    bus = zbus.open()
    cache = bus.cache().invalidate_on("events/**")
    assert cache.get("a") is None
    with pytest.raises(zbus.BusClosed):
        cache.set("a", 1)
    with pytest.raises(zbus.BusClosed):
        await cache.load("a", free)
    async with bus:
        assert await cache.load("a", free) == 1
        await publish(bus, "events/x")
        assert cache.get("a") is None


async def test_a_closed_bus_serves_nothing_and_cancels_loads_in_flight() -> None:
    loader = Loader()
    async with zbus.open() as bus:
        cache = bus.cache().invalidate_on("events/**")
        cache.set("a", 1)
        loading = asyncio.create_task(cache.load("b", loader))
        await loader.begun.wait()
    with pytest.raises(zbus.BusClosed):
        await loading
    assert loader.cancelled == 1
    assert cache.get("a") is None
    for refused in (lambda: cache.set("a", 1), lambda: bus.cache(), lambda: cache.invalidate_on("x")):
        with pytest.raises(zbus.BusClosed):
            refused()


async def test_a_loader_that_does_not_end_does_not_block_closing_the_bus() -> None:
    stubborn = asyncio.Event()

    async def load() -> None:
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                pass

    async with zbus.open(close_timeout_s=1.0) as bus:
        loading = asyncio.create_task(bus.cache().load("a", load))
        await asyncio.sleep(0.01)
        begin = time.monotonic()
    assert time.monotonic() - begin < 5
    stubborn.set()
    await asyncio.wait([loading])


async def test_a_closed_cache_receives_no_events(bus: zbus.Bus) -> None:
    cache = bus.cache().invalidate_on("events/{id}", entry="{id}")
    assert node_of(bus).network is not None
    assert node_of(bus).dispatcher.trie.routes("events/7")
    assert "events/*" in node_of(bus).network.interest.expressions
    await cache.aclose()
    assert not node_of(bus).dispatcher.trie.routes("events/7")
    assert not node_of(bus).dispatcher.trie.routes("@zbus/gap")
    assert not node_of(bus).network.interest.expressions


async def test_a_cache_and_its_values_are_freed(bus: zbus.Bus) -> None:
    class Value:
        pass

    cache: Cache | None = bus.cache().invalidate_on("events/**")
    assert cache is not None
    value = Value()
    cache.set("a", value)
    references = [weakref.ref(cache), weakref.ref(value)]
    await cache.aclose()
    del cache, value
    gc.collect()
    assert [each() for each in references] == [None, None]


# Rejected.


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": True}, "capacity"),
        ({"capacity": 1.5}, "capacity"),
        ({"capacity": 1 << 64}, "capacity"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": -1}, "ttl"),
        ({"ttl": 1e-30}, "ttl"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": 1e12}, "ttl"),
        ({"tti": "1"}, "tti"),
        ({"tti": float("inf")}, "tti"),
    ],
)
async def test_an_invalid_limit_is_rejected(bus: zbus.Bus, options: dict[str, Any], field: str) -> None:
    with pytest.raises(zbus.ConfigInvalid, match=field):
        bus.cache(**options)
    assert "caches" not in bus.stats()


async def test_an_unknown_option_is_rejected(bus: zbus.Bus) -> None:
    with pytest.raises(TypeError, match="tl"):
        bus.cache(tl=5)  # type: ignore[call-arg]


async def test_a_name_in_use_is_rejected(bus: zbus.Bus) -> None:
    bus.cache(name="a")
    with pytest.raises(zbus.ConfigInvalid, match="'a' already"):
        bus.cache(name="a")


@pytest.mark.parametrize(
    "expression",
    ["", "a//b", "a/b*", "a b", "{id}{x}/b", "a/*{id}", "a/{id", "a/id}", "a/{}", "a/{0}", "**/{id}", "a/{id:4}", 7],
)
async def test_an_invalid_expression_is_rejected(bus: zbus.Bus, expression: Any) -> None:
    with pytest.raises(zbus.KeyInvalid):
        bus.cache().invalidate_on(expression, entry="x/{id}")


@pytest.mark.parametrize(
    ("expression", "entry"),
    [
        ("a/{id}", None),
        ("a/{id}", "{other}"),
        ("a/{id}", "all"),
        ("a/{id}", "{id"),
        ("a/{id}", "{id!r}"),
        ("a/{id.x}", "{id.x}"),
        ("a/*", "{id}"),
        ("a/*", 7),
    ],
)
async def test_an_entry_that_cannot_be_built_from_the_event_is_rejected(
    bus: zbus.Bus, expression: str, entry: Any
) -> None:
    with pytest.raises(zbus.ConfigInvalid):
        bus.cache().invalidate_on(expression, entry=entry)


async def test_an_unhashable_key_is_rejected(bus: zbus.Bus) -> None:
    cache: Any = bus.cache()
    for refused in (lambda: cache.get([]), lambda: cache.set([], 1), lambda: cache.remove([])):
        with pytest.raises(zbus.ConfigInvalid, match="hashable"):
            refused()
    with pytest.raises(zbus.ConfigInvalid, match="hashable"):
        await cache.load([], free)
