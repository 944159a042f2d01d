"""`@bus.on`: handlers for services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from inside import node_of
from mesh_fakes import Counts, recorded

import zbus
from zbus.deliver import handlers


async def until(condition: object, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.002)


async def test_a_handler_runs_for_every_event_in_order(log_path: Path) -> None:
    seen: list[int] = []
    async with zbus.open(log_path) as bus:

        @bus.on("shop/**", "audit/*")
        async def handle(event: zbus.Event) -> None:
            seen.append(event.offset)

        await (await bus.publisher("shop/x")).publish_many([b""] * 20)
        await (await bus.publisher("other/x")).publish(b"")
        await (await bus.publisher("audit/x")).publish(b"")
        await until(lambda: len(seen) == 21)

    assert seen == [*range(1, 21), 22]


async def test_a_handler_may_be_named_before_the_bus_is_open(log_path: Path) -> None:
    seen: list[bytes] = []
    bus = zbus.open(log_path)

    @bus.on("**")
    async def handle(event: zbus.Event) -> None:
        seen.append(event.payload)

    async with bus:
        await (await bus.publisher("a/b")).publish(b"x")
        await until(lambda: bool(seen))

    assert seen == [b"x"]


async def test_a_durable_handler_that_raises_gets_the_same_event_again(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "zbus")
    seen: list[int] = []
    async with zbus.open(log_path) as bus:

        @bus.on("**", durable="billing")
        async def handle(event: zbus.Event) -> None:
            seen.append(event.offset)
            if seen.count(2) < 3 and event.offset == 2:
                raise ValueError("not yet")

        await (await bus.publisher("a/b")).publish_many([b""] * 3)
        await until(lambda: 3 in seen)
        assert bus.stats()["handler_errors"] == 2

    assert seen == [1, 2, 2, 2, 3]


async def test_a_handler_that_raises_without_a_durable_name_is_reported_and_goes_on(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    async with zbus.open(log_path) as bus:

        @bus.on("**")
        async def handle(event: zbus.Event) -> None:
            seen.append(event.offset)
            raise ValueError("bad")

        await (await bus.publisher("a/b")).publish_many([b""] * 2)
        await until(lambda: seen == [1, 2])
        await until(lambda: bus.stats().get("handler_errors") == 2)

    assert any("EVENT_RETRY" in record.getMessage() and record.exc_info for record in caplog.records)


class Panic(BaseException):
    """An error of a foreign library that is not an `Exception`."""


@pytest.mark.parametrize("error", [asyncio.CancelledError, Panic])
async def test_a_cancellation_inside_a_handler_is_its_failure_and_not_its_end(
    log_path: Path, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "zbus")
    seen: dict[str, list[int]] = {"plain": [], "durable": []}
    async with zbus.open(log_path) as bus:

        @bus.on("a/**")
        async def handle(event: zbus.Event) -> None:
            seen["plain"].append(event.offset)
            if event.offset == 1:
                raise error

        @bus.on("a/**", durable="billing")
        async def retry(event: zbus.Event) -> None:
            seen["durable"].append(event.offset)
            if len(seen["durable"]) == 1:
                raise error

        with recorded() as records:
            await (await bus.publisher("a/b")).publish_many([b""] * 3)
            await until(lambda: len(seen["plain"]) == 3 and len(seen["durable"]) == 4)
        assert seen == {"plain": [1, 2, 3], "durable": [1, 1, 2, 3]}
        assert bus.stats()["handler_errors"] == 2
        retries = [each for each in records if each["record"] == "EVENT_RETRY"]
        assert [error.__name__ in each["error"] for each in retries] == [True, True]


async def test_a_handler_that_ends_while_the_bus_is_open_is_reported() -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    async with zbus.open() as bus:

        @bus.on("a/**")
        async def handle(event: zbus.Event) -> None: ...

        (task,) = node_of(bus)._services
        task.cancel()
        await until(lambda: not node_of(bus)._services)
        assert reported == ["a handler of @bus.on stopped: its subscription failed"]

        @bus.on("a/**")
        async def another(event: zbus.Event) -> None: ...

    assert len(reported) == 1  # closing the bus ends a handler as it should


async def test_what_a_handler_did_before_closing_is_not_repeated(log_path: Path) -> None:
    seen: list[int] = []
    for _ in range(3):
        async with zbus.open(log_path) as bus:

            @bus.on("**", durable="billing", start="beginning")
            async def handle(event: zbus.Event) -> None:
                seen.append(event.offset)

            publisher = await bus.publisher("a/b")
            await publisher.publish_many([b""] * 10)
            target = await bus.head()
            await until(lambda: seen[-1:] == [target])  # noqa: B023
            await until(lambda: node_of(bus).log is not None and node_of(bus).log.cursors.list()[0].offset == target)  # noqa: B023

    assert seen == list(range(1, 31))


class OneEvent:
    """A durable subscription with one event."""

    durable = "billing"

    def __init__(self) -> None:
        self._events: list[zbus.Event | None] = [zbus.Event(1, 0, 0, "a", b"", {}), None]

    async def next(self) -> zbus.Event | None:
        return self._events.pop(0)

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize(
    ("uniform", "pauses"),
    [(lambda low, high: low, [0.025, 0.05, 0.1]), (lambda low, high: high, [0.05, 0.1, 0.2])],
    ids=["shortest", "longest"],
)
async def test_the_pauses_of_a_handler_grow_and_are_shortened_by_chance(
    monkeypatch: pytest.MonkeyPatch, uniform: Callable[[float, float], float], pauses: list[float]
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def handle(event: zbus.Event) -> None:
        raise ValueError("down")

    monkeypatch.setattr(handlers, "asyncio", SimpleNamespace(sleep=sleep, CancelledError=asyncio.CancelledError))
    with recorded() as records:
        await handlers.serve(OneEvent(), handle, lambda name, number: None, uniform, 3)  # type: ignore[arg-type]

    assert slept == pytest.approx(pauses)
    assert [each["again_in_s"] for each in records if each["record"] == "EVENT_RETRY"] == pytest.approx(pauses)


async def test_a_payload_that_cannot_be_decoded_is_counted_and_recorded_and_the_handler_continues() -> None:
    subscription, counts, seen = OneEvent(), Counts(), list[zbus.Event]()
    invalid = zbus.PayloadInvalid("not a number", zbus.Event(1, 0, 0, "a", b"x", {}))
    following, failures = subscription.next, [invalid]

    async def next_event() -> zbus.Event | None:
        if failures:
            raise failures.pop()
        return await following()

    async def handle(event: zbus.Event) -> None:
        seen.append(event)

    subscription.next = next_event  # type: ignore[method-assign]
    with recorded() as records:
        await handlers.serve(subscription, handle, counts.add, lambda low, high: low)  # type: ignore[arg-type]

    assert (counts, len(seen)) == ({"invalid_payloads": 1}, 1)
    assert [(each["record"], each["code"], each["reason"]) for each in records] == [
        ("EVENT_INVALID", "payload_invalid", str(invalid))
    ]


@pytest.mark.parametrize("decorator", ["on", "serve"])
async def test_a_plain_function_is_refused_as_a_handler(decorator: str) -> None:
    async with zbus.open() as bus:

        def plain(event: zbus.Event) -> None:
            pass

        with pytest.raises(zbus.ConfigInvalid, match=f"@bus.{decorator} needs an `async def`"):
            getattr(bus, decorator)("a/b")(plain)


async def test_the_decorator_without_a_key_expression_is_refused() -> None:
    async with zbus.open() as bus:
        with pytest.raises(zbus.ConfigInvalid, match="needs a key expression"):

            @bus.on  # type: ignore[arg-type]
            async def handler(event: zbus.Event) -> None:
                pass
