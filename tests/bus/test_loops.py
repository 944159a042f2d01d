"""A bus belongs to the event loop that opened it: on another loop or thread, calls are errors and store nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import zbus
from zbus import WrongLoop

KEY = "shop/orders"

CALLS: dict[str, Callable[[zbus.Bus, zbus.EventPublisher], Coroutine[Any, Any, Any]]] = {
    "publish": lambda bus, publisher: publisher.publish(b"x"),
    "publish with headers": lambda bus, publisher: publisher.publish({"x": 1}, headers={"a": "b"}),
    "publish_many": lambda bus, publisher: publisher.publish_many([b"x", b"y"]),
    "put": lambda bus, publisher: bus.put(zbus.Event(7, 0, 1, KEY, b"x")),
    "session": lambda bus, publisher: bus.session("alice-7").publish(KEY, b"x"),
    "publisher": lambda bus, publisher: bus.publisher(KEY),
    "request": lambda bus, publisher: bus.request(KEY),
}


async def elsewhere(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of a coroutine on the loop of another thread."""
    return await asyncio.to_thread(lambda: asyncio.run(asyncio.wait_for(call(), 5)))


@pytest.mark.parametrize("log", [None, "memory"])
@pytest.mark.parametrize("name", CALLS)
async def test_on_another_loop_a_call_is_an_error_and_nothing_is_stored(name: str, log: str | None) -> None:
    async with zbus.open(log) as bus:
        publisher = await bus.publisher(KEY)
        assert await publisher.publish(b"first") == (1 if log else 0)  # the publisher has checked its key
        subscription = bus.subscribe("**")

        with pytest.raises(WrongLoop, match="stored and sent nothing"):
            await elsewhere(lambda: CALLS[name](bus, publisher))

        assert subscription.queued == 0
        assert await publisher.publish(b"second") == (2 if log else 0)
        assert publisher.sequence == 2
        assert (await anext(subscription)).payload == b"second"


async def test_on_another_loop_a_subscription_is_neither_opened_nor_read(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        subscription = bus.subscribe("**")

        with pytest.raises(WrongLoop, match="cannot subscribe"):
            await asyncio.to_thread(bus.subscribe, "**")
        with pytest.raises(WrongLoop, match="cannot subscribe"):
            await elsewhere(lambda: subscribe(bus))
        with pytest.raises(WrongLoop, match="cannot read"):
            await elsewhere(subscription.next)

        assert bus.stats()["subscriptions"] == 1
        await (await bus.publisher(KEY)).publish(b"x")
        assert (await anext(subscription)).payload == b"x"


async def subscribe(bus: zbus.Bus) -> None:
    bus.subscribe("**")


async def test_on_another_loop_no_event_is_acknowledged(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher(KEY)).publish(b"x")
        async with bus.subscribe("**", durable="billing", start="beginning") as subscription:
            event = await anext(subscription)

            async def acknowledge() -> None:
                await event.ack()

            with pytest.raises(WrongLoop, match="cannot acknowledge"):
                await elsewhere(acknowledge)

            assert subscription.acknowledged == 0
            await event.ack()
            assert subscription.acknowledged == 1


async def test_a_handler_cannot_be_registered_from_another_thread() -> None:
    async def handler(event: zbus.Event) -> None: ...

    async with zbus.open("memory") as bus:
        with pytest.raises(WrongLoop, match="register a handler"):
            await asyncio.to_thread(lambda: bus.on("**")(handler))


@pytest.mark.parametrize("log", [None, "memory"])
def test_on_a_later_loop_of_the_same_thread_nothing_is_published(log: str | None) -> None:
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        bus = zbus.open(log)
        first.run_until_complete(bus.start())
        publisher = first.run_until_complete(bus.publisher(KEY))
        assert first.run_until_complete(publisher.publish(b"first")) == (1 if log else 0)

        with pytest.raises(WrongLoop):
            second.run_until_complete(publisher.publish(b"x"))

        assert first.run_until_complete(publisher.publish(b"second")) == (2 if log else 0)
        assert publisher.sequence == 2
        first.run_until_complete(bus.aclose())
    finally:
        first.close()
        second.close()
