"""`@bus.cached`: a function whose results are cached by its arguments until an event invalidates them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pytest

import zbus


@pytest.fixture
async def bus() -> AsyncIterator[zbus.Bus]:
    async with zbus.open() as bus:
        yield bus


async def publish(bus: zbus.Bus, key: str) -> None:
    await (await bus.publisher(key)).publish(b"")


async def test_calls_with_equal_arguments_share_an_entry_however_they_are_spelt(bus: zbus.Bus) -> None:
    calls: list[Any] = []

    @bus.cached()
    async def todo(todo_id: int, /, lang: str = "en", *more: int, deep: bool = False, **rest: Any) -> Any:
        calls.append((todo_id, lang, more, deep, rest))
        return len(calls)

    spelt = [
        await todo(7),
        await todo(7, "en"),
        await todo(7, lang="en"),
        await todo(7, deep=False),
        await todo(7, "en", 1, 2, deep=True, x=1, y=2),
        await todo(7, "en", 1, 2, y=2, x=1, deep=True),
        await todo(7, todo_id=8),
        await todo(7, todo_id=8, lang="en"),
    ]
    assert spelt == [1, 1, 1, 1, 2, 2, 3, 3]
    assert calls == [
        (7, "en", (), False, {}),
        (7, "en", (1, 2), True, {"x": 1, "y": 2}),
        (7, "en", (), False, {"todo_id": 8}),
    ]
    with pytest.raises(TypeError, match="missing 1 required"):
        await todo()  # type: ignore[call-arg]


async def test_a_function_without_arguments_and_one_that_returns_none_are_cached(bus: zbus.Bus) -> None:
    calls = 0

    @bus.cached(invalidate_on=["events/Todo/**", "events/User/**"])
    async def everything() -> None:
        nonlocal calls
        calls += 1

    for _ in range(3):
        assert await everything() is None
    assert calls == 1
    for number, key in enumerate(["events/Todo/7", "events/User/7"], 2):
        await publish(bus, key)
        await everything()
        assert calls == number


async def test_a_template_selects_the_arguments_of_the_key(bus: zbus.Bus) -> None:
    @dataclass
    class Todo:
        id: int
        text: str

    @bus.cached(key="{todo.id}/'{lang}'\\{{}}", invalidate_on="events/{todo.id}")
    async def render(todo: Todo, lang: str, force: Any) -> str:
        return f"{todo.text} {lang}"

    assert await render(Todo(7, "milk"), "en", []) == "milk en"
    assert await render(Todo(7, "bread"), "en", {}) == "milk en"
    assert await render(Todo(7, "bread"), "de", {}) == "bread de"
    assert render.cache.get("7/'en'\\{}") == "milk en"
    await publish(bus, "events/8")
    assert await render(Todo(7, "eggs"), "en", 1) == "milk en"
    await publish(bus, "events/7")
    assert await render(Todo(7, "eggs"), "en", 1) == "eggs en"


async def test_a_callable_makes_the_key(bus: zbus.Bus) -> None:
    @bus.cached(key=lambda word, *, loud: (word.lower(), loud))
    async def say(word: str, *, loud: bool = False) -> str:
        return word

    assert [await say("A"), await say("a"), await say("a", loud=True)] == ["A", "A", "a"]
    say.cache.remove(("a", False))
    assert await say("a") == "a"


async def test_only_the_entries_of_the_named_argument_are_invalidated(bus: zbus.Bus) -> None:
    calls: list[Any] = []

    @bus.cached(invalidate_on=["events/Todo/{todo_id}", "events/Lang/{lang}/*", "events/All"])
    async def todo(todo_id: int | str, lang: str = "en") -> int:
        calls.append((todo_id, lang))
        return len(calls)

    async def again() -> list[Any]:
        calls.clear()
        for each in (7, "7", 8):
            await todo(each)
            await todo(each, "de")
        return list(calls)

    everything = [(7, "en"), (7, "de"), ("7", "en"), ("7", "de"), (8, "en"), (8, "de")]
    assert await again() == everything
    assert await again() == []
    await publish(bus, "events/Todo/7")
    assert await again() == everything[:4]
    await publish(bus, "events/Lang/de/x")
    assert await again() == everything[1::2]
    await publish(bus, "events/All")
    assert await again() == everything
    await publish(bus, "events/Todo/9")
    assert await again() == []


async def test_a_load_that_began_before_the_event_is_not_stored(bus: zbus.Bus) -> None:
    go_on, calls = asyncio.Event(), 0

    @bus.cached(invalidate_on="events/Todo/{todo_id}")
    async def todo(todo_id: int) -> int:
        nonlocal calls
        calls += 1
        number = calls
        await go_on.wait()
        return number

    before = [asyncio.create_task(todo(7)) for _ in range(2)]
    await asyncio.sleep(0.01)
    await publish(bus, "events/Todo/7")
    after = asyncio.create_task(todo(7))
    await asyncio.sleep(0.01)
    go_on.set()
    assert await asyncio.gather(*before, after) == [1, 1, 2]
    assert await todo(7) == 2


async def test_an_entry_is_invalidated_however_many_were_loaded_since(bus: zbus.Bus) -> None:
    calls: list[int] = []

    @bus.cached(invalidate_on="events/Todo/{todo_id}", capacity=10)
    async def todo(todo_id: int) -> int:
        calls.append(todo_id)
        return todo_id

    for _ in range(20):
        await todo(7)  # used often, so moka keeps it
    for other in range(100, 160):
        await todo(other)
        await todo(7)
    await publish(bus, "events/Todo/7")
    calls.clear()
    await todo(7)
    assert calls == [7]
    stats = todo.cache.stats()
    assert stats["entries"] <= 10
    assert stats["evictions"] >= 50


async def test_a_plain_function_runs_on_a_thread_and_is_awaited(bus: zbus.Bus) -> None:
    @bus.cached()
    def total(first: int, *, second: int = 2) -> tuple[int, bool]:
        return first + second, threading.current_thread() is threading.main_thread()

    assert await total(1) == (3, False)
    assert await total(1, second=2) == (3, False)
    assert total.cache.stats()["loads"] == 1


async def test_a_hit_can_be_awaited_wherever_a_miss_can(bus: zbus.Bus) -> None:
    @bus.cached()
    async def todo(todo_id: int) -> int:
        """One todo."""
        return todo_id

    for _ in range(2):  # a miss, then hits
        todo.cache.clear()
        assert await asyncio.create_task(todo(7)) == 7
        assert await asyncio.create_task(todo(7)) == 7
        assert await asyncio.gather(todo(7), todo(8)) == [7, 8]
        assert await asyncio.wait_for(todo(7), 5) == 7
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(todo(each)) for each in (7, 9)]
        assert [each.result() for each in tasks] == [7, 9]
    assert asyncio.iscoroutine(todo(7))
    assert inspect.signature(todo).parameters.keys() == {"todo_id"}
    assert (todo.__name__, todo.__doc__) == ("todo", "One todo.")
    assert await bus.cache().load("a", todo, 7) == 7


async def test_a_function_decorated_before_the_bus_opens_works_once_it_is_open() -> None:
    bus = zbus.open()

    @bus.cached(invalidate_on="events/**", name="todos")
    async def todo(todo_id: int) -> int:
        return todo_id

    with pytest.raises(zbus.BusClosed):
        await todo(7)
    async with bus:
        assert await todo(7) == 7
        assert await todo(7) == 7
        assert bus.stats()["caches"]["todos"]["hits"] == 1
    with pytest.raises(zbus.BusClosed):
        await todo(7)


async def test_statistics_count_calls(bus: zbus.Bus) -> None:
    @bus.cached(name="todo")
    async def todo(todo_id: int) -> int:
        return 1 // todo_id

    for todo_id in (7, 7, 7, 8):
        await todo(todo_id)
    with pytest.raises(ZeroDivisionError):
        await todo(0)
    found = bus.stats()["caches"]["todo"]
    expected = {"hits": 2, "misses": 3, "loads": 3, "load_errors": 1, "invalidations": 0, "evictions": 0, "entries": 2}
    assert found == expected


# Rejected.


async def function(todo_id: int, lang: str = "en") -> int:
    return todo_id


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"key": "todo/{id}"}, "todo_id, lang"),
        ({"key": "todo"}, "no field"),
        ({"key": "todo/{todo_id"}, "not a valid template"),
        ({"key": "todo/{todo_id:>{lang}}"}, "a field must be"),
        ({"key": "todo/{todo_id!r}"}, "a field must be"),
        ({"key": "todo/{}"}, "a field must be"),
        ({"key": "{todo_id[0]}"}, "a field must be"),
        ({"key": 7}, "neither"),
        ({"invalidate_on": "events/{id}"}, "todo_id, lang"),
        ({"invalidate_on": "events/{todo_id}", "key": "{lang}"}, "every field"),
        ({"invalidate_on": "events/{todo_id}", "key": lambda todo_id, lang: lang}, "every field"),
        ({"capacity": 0}, "capacity"),
    ],
)
async def test_options_that_do_not_match_the_function_are_rejected(
    bus: zbus.Bus, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(zbus.ConfigInvalid, match=reason):
        bus.cached(**options)(function)
    assert "caches" not in bus.stats()


@pytest.mark.parametrize("expression", ["", "a//b", "events/{todo_id", "**/{todo_id}", ["a", "b c"], [7]])
async def test_an_invalid_expression_is_rejected(bus: zbus.Bus, expression: Any) -> None:
    with pytest.raises(zbus.KeyInvalid):
        bus.cached(invalidate_on=expression)(function)


async def test_a_function_that_returns_several_values_is_rejected(bus: zbus.Bus) -> None:
    async def stream() -> AsyncIterator[int]:
        yield 1

    for refused in (stream, lambda: (yield), 7):
        with pytest.raises(zbus.ConfigInvalid, match="one value"):
            bus.cached()(refused)  # type: ignore[arg-type,call-overload]

    async def reserved(_zbus_get: int) -> None: ...

    with pytest.raises(zbus.ConfigInvalid, match="_zbus_"):
        bus.cached()(reserved)


async def test_an_unknown_option_is_rejected(bus: zbus.Bus) -> None:
    with pytest.raises(TypeError, match="invalidate"):
        bus.cached(invalidate="a/**")  # type: ignore[call-arg]


async def test_an_argument_that_cannot_be_a_key_is_rejected_and_the_function_is_not_called(bus: zbus.Bus) -> None:
    @bus.cached()
    async def todo(todo_id: Any) -> None:
        raise AssertionError

    with pytest.raises(zbus.ConfigInvalid, match="hashable"):
        await todo([7])


class Number(IntEnum):
    SEVEN = 7


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("a/b", zbus.KeyInvalid),  # no event of one segment could ever name it
        ("", zbus.KeyInvalid),
        ("a b", zbus.KeyInvalid),
        ("@x", zbus.KeyInvalid),
        ("*", zbus.KeyInvalid),
        (True, zbus.ConfigInvalid),  # equals 1, but its text differs
        (7.0, zbus.ConfigInvalid),
        (Number.SEVEN, zbus.ConfigInvalid),
    ],
)
async def test_an_argument_that_no_event_could_name_is_rejected(
    bus: zbus.Bus, value: Any, error: type[Exception]
) -> None:
    @bus.cached(invalidate_on="events/Todo/{todo_id}")
    async def todo(todo_id: Any) -> Any:
        return todo_id

    with pytest.raises(error):
        await todo(value)
    assert await todo(7) == 7


async def test_only_calls_add_entries_to_the_cache_of_a_function(bus: zbus.Bus) -> None:
    cached = bus.cached(invalidate_on="events/{todo_id}")(function)
    with pytest.raises(zbus.ZbusError, match="only calls of the function"):
        cached.cache.set((7, "en"), 8)
    with pytest.raises(zbus.ZbusError, match="only calls of the function"):
        await cached.cache.load((7, "en"), function, 8)
    assert await cached(7) == 7
