"""Each built-in invariant notices what it is about. The world is broken from outside, below the production code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

import zbus
import zbus.sim
from zbus.sim import InvariantBroken, World
from zbus.sim.ledger import (
    AGAIN,
    CONVERGES,
    DELIVERED,
    EARLY,
    GAP_REAL,
    GAP_REPORTED,
    INVARIANTS,
    MATCHING,
    MEMORY,
    NO_EXCEPTION,
    ORDER,
    UNIQUE,
)


async def read(bus: Any) -> None:
    async with bus.subscribe("shop/**", durable="billing") as subscription:
        async for _ in subscription:
            pass


async def listen(bus: Any) -> None:
    async with bus.subscribe("shop/**") as subscription:
        async for _ in subscription:
            pass


def broken(scene: Callable[[World], Awaitable[object]], **options: Any) -> set[str]:
    """Play a scene, and return the invariants that it breaks."""

    async def main() -> None:
        async with zbus.sim.world(seed=5, converge_s=20.0, **options) as world:
            await scene(world)

    try:
        zbus.sim.run(main())
    except InvariantBroken as error:
        assert (error.seed, "seed 5" in str(error)) == (5, True)  # noqa: PT017 - some scenes break nothing
        return {each.invariant for each in error.violations}
    return set()


async def two(world: World, program: Any = read) -> Any:
    """A node `b` that reads, and a publisher on `a`."""
    await world.node("b", log=True, program=program)
    node = await world.node("a", log=True)
    await world.run(2.0)
    return await node.bus.publisher("shop/a")


def test_a_sound_world_breaks_nothing() -> None:
    async def scene(world: World) -> None:
        publisher = await two(world)
        for number in range(20):
            await publisher.publish(b"%d" % number)

    assert broken(scene) == set()


@pytest.mark.parametrize(("program", "invariant"), [(read, DELIVERED), (listen, GAP_REPORTED)])
def test_a_lost_event(program: Any, invariant: str) -> None:
    async def scene(world: World) -> None:
        publisher = await two(world, program)
        await publisher.publish(b"1")
        await world.run(3.0)
        world.ledger.acknowledged("a", (99, 0), "shop/a", world.now)  # nobody has this one

    assert broken(scene) == {invariant}


def test_events_before_a_subscription_and_those_of_unreachable_nodes_are_not_owed() -> None:
    async def scene(world: World) -> None:
        away = await world.node("away", log=True, transport="sim://elsewhere")
        node = await world.node("a", log=True)
        await (await node.bus.publisher("shop/a")).publish(b"early")
        await world.run(1.0)
        await world.node("b", log=True, program=read)
        await world.run(1.0)
        await (await away.bus.publisher("shop/a")).publish(b"elsewhere")

    assert broken(scene) == set()


def test_an_event_out_of_order_and_one_that_was_acknowledged() -> None:
    async def scene(world: World) -> None:
        publisher = await two(world)
        for number in range(3):
            await publisher.publish(b"%d" % number)
        await world.run(1.0)
        account = world.ledger.accounts["b", "billing"]
        (reader,) = account.readers
        (row,) = world.disks["b.db"].rows[:1]
        reader.delivered(row.event(1))

    assert broken(scene) == {ORDER, AGAIN}


def test_an_offset_and_an_identity_that_are_used_twice() -> None:
    async def scene(world: World) -> None:
        publisher = await two(world)
        await publisher.publish(b"1")
        await world.run(1.0)
        disk = world.disks["a.db"]
        disk.rows.pop()
        disk.identities.clear()
        await publisher.publish(b"2")

    assert UNIQUE in broken(scene)

    async def another(world: World) -> None:
        publisher = await two(world)
        offset = await publisher.publish(b"1")
        row = world.disks["a.db"].rows[0]
        altered = msgspec.structs.replace(row, payload=b"other")
        world.ledger.stored("a", world.disks["a.db"], [altered], [int(offset)], 0)

    assert UNIQUE in broken(another)


def test_an_event_that_was_altered_or_never_published() -> None:
    async def scene(world: World) -> None:
        await two(world)
        stranger = zbus.Event(4711, 0, 1, "shop/a", b"forged")
        (reader,) = world.ledger.accounts["b", "billing"].readers
        reader.delivered(stranger)

    assert UNIQUE in broken(scene)


def test_a_gap_that_is_not_real() -> None:
    async def scene(world: World) -> None:
        publisher = await two(world)
        offset = await publisher.publish(b"1")
        await world.run(1.0)
        (reader,) = world.ledger.accounts["b", "billing"].readers
        fields = {"publisher_id": offset.publisher_id, "first": 0, "last": 0, "key": "shop/a", "open": False}
        world.ledger.gap_reported(reader, fields)

    assert broken(scene) == {GAP_REAL}


def test_a_gap_of_events_that_never_existed() -> None:
    async def scene(world: World) -> None:
        await two(world)
        (reader,) = world.ledger.accounts["b", "billing"].readers
        fields = {"publisher_id": 1, "first": 5, "last": 9, "key": "shop/a", "open": True}
        world.ledger.gap_reported(reader, fields)

    assert broken(scene) == {GAP_REAL}


def test_a_node_that_never_finishes() -> None:
    async def scene(world: World) -> None:
        await two(world)
        node = world.nodes["b"].bus._node
        node.backpressure.block(node, "commits_pending", "for ever")

    assert broken(scene) == {CONVERGES}


def test_a_memory_bound() -> None:
    async def scene(world: World) -> None:
        await two(world)
        node = world.nodes["b"].bus._node
        node.dispatcher.passed.update((1, number) for number in range(200_000))
        await world.run(2.0)
        node.dispatcher.passed.clear()

    assert broken(scene) == {MEMORY}


def test_an_exception_of_a_callback_or_of_a_program() -> None:
    async def fails(bus: Any) -> None:
        raise ValueError("a program")

    async def scene(world: World) -> None:
        world.loop.call_later(1.0, lambda: 1 / 0)
        await world.node("a", program=fails)
        await world.run(2.0)

    async def main() -> None:
        async with zbus.sim.world(seed=5) as world:
            await scene(world)

    with pytest.raises(InvariantBroken) as caught:
        zbus.sim.run(main())
    assert [each.invariant for each in caught.value.violations] == [NO_EXCEPTION, NO_EXCEPTION]
    assert "ZeroDivisionError" in str(caught.value)
    assert "a program" in str(caught.value)


def test_an_invariant_of_ones_own_is_checked_every_second_and_reported_once() -> None:
    calls: list[float] = []

    async def main() -> None:
        async with zbus.sim.world(seed=5) as world:

            @world.invariant
            def stock_is_never_negative(world: World) -> str | None:
                calls.append(world.now)
                return "it is -1" if world.now > 2.5 else None

            await world.run(5.0)

    with pytest.raises(InvariantBroken, match="stock is never negative at 3"):
        zbus.sim.run(main())
    assert len(calls) >= 5


def test_an_invariant_can_be_left_out_by_name() -> None:
    async def scene(world: World) -> None:
        world.without(GAP_REAL)
        await two(world)
        (reader,) = world.ledger.accounts["b", "billing"].readers
        fields = {"publisher_id": 1, "first": 5, "last": 9, "key": "shop/a", "open": True}
        world.ledger.gap_reported(reader, fields)

    assert broken(scene) == set()

    async def unknown(world: World) -> None:
        world.without("everything is fine")

    with pytest.raises(zbus.ConfigInvalid, match="no invariant"):
        broken(unknown)


def test_every_invariant_has_a_test() -> None:
    from pathlib import Path

    source = Path(__file__).read_text()
    names = {name for name, value in vars(zbus.sim.ledger).items() if value in INVARIANTS and isinstance(value, str)}
    untested = {name for name in names if f"{name}," not in source and f"{name}}}" not in source}
    assert untested <= {"CLOSES", "LOGS_EQUAL"}  # below by its text, and in test_real_log.py


async def slowly(bus: Any) -> None:
    async with bus.subscribe("shop/**", durable="billing") as subscription:
        async for _ in subscription:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(("early", "expected"), [(True, {EARLY}), (False, set())])
def test_a_position_that_is_stored_while_the_event_is_handled(early: bool, expected: set[str]) -> None:
    async def scene(world: World) -> None:
        publisher = await two(world, slowly)
        for number in range(5):
            await publisher.publish(b"%d" % number)
        await world.run(0.05)
        if early:
            (subscription,) = [each for each in world.nodes["b"].bus._node.dispatcher.subscriptions if each.durable]
            acknowledgements = subscription.subscriber._durable
            await world.nodes["b"].call(lambda: acknowledgements.acknowledge(1))

    assert broken(scene) == expected


def test_an_event_that_its_subscriber_acknowledges_itself_is_not_early() -> None:
    async def program(bus: Any) -> None:
        async with bus.subscribe("shop/**", durable="billing") as subscription:
            async for event in subscription:
                await event.ack()
                await asyncio.sleep(0.1)

    async def scene(world: World) -> None:
        publisher = await two(world, program)
        for number in range(5):
            await publisher.publish(b"%d" % number)

    assert broken(scene) == set()


def test_an_event_that_comes_again_after_an_orderly_end() -> None:
    async def scene(world: World) -> None:
        publisher = await two(world)
        for number in range(5):
            await publisher.publish(b"%d" % number)
        await world.run(2.0)
        await world.nodes["b"].stop()
        disk = world.nodes["b"].disk
        assert disk is not None
        disk.cursors["billing"] = disk.cursors["billing"]._replace(offset=3)
        await world.nodes["b"].start()
        await world.run(2.0)

    assert broken(scene) == {AGAIN}


def test_an_event_of_another_key() -> None:
    async def scene(world: World) -> None:
        await two(world, listen)
        other = await world.nodes["b"].bus.publisher("other/b")
        (subscription,) = [
            each for each in world.nodes["b"].bus._node.dispatcher.subscriptions if "shop/**" in each.key_exprs
        ]
        world.nodes["b"].bus._node.dispatcher.trie.add("other/**", subscription)
        await other.publish(b"1")

    assert broken(scene) == {MATCHING}


def test_headers_that_are_lost() -> None:
    async def scene(world: World) -> None:
        publisher = await two(world, listen)
        arrived = world.nodes["b"].fabrics[0].arrived

        def without_headers(key: str, frame: bytes) -> None:
            arrived(key, frame.replace(b"\x81\xa1n\xa11", b"\x80"))

        world.nodes["b"].fabrics[0].arrived = without_headers  # type: ignore[method-assign]
        await publisher.publish(b"1", headers={"n": "1"})

    assert broken(scene) == {UNIQUE}


def test_a_queue_that_grows_a_little() -> None:
    async def program(bus: Any) -> None:
        async with bus.subscribe("shop/**", queue_events=5) as subscription:
            subscription._buffer.capacity = 100
            await asyncio.sleep(10.0)
            with suppress(zbus.SubscriberLagged):
                async for _ in subscription:
                    pass
            await asyncio.Event().wait()

    async def scene(world: World) -> None:
        world.without(GAP_REPORTED)
        publisher = await two(world, program)
        for number in range(20):
            await publisher.publish(b"%d" % number)
        await world.run(3.0)

    assert broken(scene) == {MEMORY}


def test_closing_that_takes_too_long() -> None:
    async def scene(world: World) -> None:
        await two(world)
        inside = world.nodes["b"].bus._node
        close = inside.aclose

        async def slow() -> None:
            await asyncio.sleep(20.0)
            await close()

        inside.aclose = slow  # type: ignore[method-assign]

    assert broken(scene) == {"closing takes bounded time"}
