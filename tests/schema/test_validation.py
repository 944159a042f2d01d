"""Validation on read: an invalid event from another node, or stored before its schema was registered."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from pydantic import BaseModel

import zbus

KEY, EXPRESSION = "shop/orders/created", "shop/*/created"
GOOD, BAD = b'{"id": 1}', b'{"id": "one", "rest": "' + b"x" * 500 + b'"}'


class Order(BaseModel):
    id: int


async def until(condition: Any, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


async def wanted(bus: zbus.Bus) -> None:
    """Wait until the other node's subscription is known here."""
    assert node_of(bus).network is not None
    while not await node_of(bus).run(node_of(bus).network.links[0].fabric.ready, KEY):
        await asyncio.sleep(0.005)


def records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [getattr(each, "zbus", {}) for each in caplog.records]
    return [each for each in found if each.get("record") == "EVENT_INVALID_SCHEMA"]


async def store_before(log_path: Path, *payloads: bytes, mode: Any = "strict") -> zbus.Schema:
    """Store events, and then register their schema."""
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher(KEY)
        for payload in payloads:
            await publisher.publish(payload)
        return await bus.schemas.register(EXPRESSION, Order, mode=mode)


async def read_all(subscription: zbus.EventSubscriber, number: int) -> list[Any]:
    """Return the offsets that a subscriber receives, with the errors in between."""
    found: list[Any] = []
    async with asyncio.timeout(20):
        while len(found) < number:
            try:
                found.append((await anext(subscription)).offset)
            except zbus.SchemaInvalid as error:
                found.append(error)
    return found


async def test_a_subscriber_receives_an_error_for_an_invalid_event_and_then_the_next_event(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "zbus")
    made = await store_before(log_path, GOOD, BAD, BAD, GOOD)

    async with zbus.open(log_path) as bus, bus.subscribe("**", start="beginning") as subscription:
        first, second, third, fourth = await read_all(subscription, 4)

        assert (first, fourth) == (1, 4)
        assert isinstance(second, zbus.SchemaInvalid)
        assert (second.key, second.topic, second.payload) == (KEY, "created", BAD)
        assert second.expected_hash == made.hash
        assert second.event is not None
        assert (second.event.offset, third.event.offset) == (2, 3)
        assert "the log still has it" in str(second)
        assert bus.stats()["invalid_schema"] == 2
    (reported,) = records(caplog)  # once per key and minute
    assert (reported["key"], reported["topic"], reported["offset"]) == (KEY, "created", 2)
    assert (reported["expected_hash"], reported["payload"], reported["payload_bytes"]) == (
        made.hash,
        BAD[:200],
        len(BAD),
    )
    assert reported["reason"].startswith("$.id: ")


async def test_a_permissive_schema_delivers_an_invalid_event_and_logs_it(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "zbus")
    await store_before(log_path, GOOD, BAD, GOOD, mode="permissive")

    async with zbus.open(log_path) as bus, bus.subscribe("**", start="beginning") as subscription:
        assert await read_all(subscription, 3) == [1, 2, 3]
        assert bus.stats()["invalid_schema"] == 1
    assert [each["offset"] for each in records(caplog)] == [2]


@pytest.mark.parametrize("options", [{}, {"overflow": "block"}, {"schema": dict}, {"overflow": "spill"}], ids=str)
async def test_live_events_of_another_node_are_validated_against_the_schemas_of_this_one(
    log_path: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    endpoint = f"unixsock-stream/{tmp_path}/zenoh.sock"
    async with zbus.open(log_path, mode="peer", listen=[endpoint]) as here:
        async with here.subscribe("shop/**", **options) as subscription:
            async with zbus.open(mode="peer", connect=[endpoint]) as there, asyncio.timeout(30):
                await wanted(there)
                publisher = await there.publisher(KEY)
                await publisher.publish(BAD)
                assert (await anext(subscription)).payload == BAD  # no schema yet
                await here.schemas.register(EXPRESSION, Order)  # while the subscription is open
                await publisher.publish(BAD)
                await publisher.publish(GOOD)
                await until(lambda: subscription.queued == 2)
                with pytest.raises(zbus.SchemaInvalid, match=r"\$\.id"):
                    await anext(subscription)
                assert (await anext(subscription)).payload == GOOD
                await here.schemas.remove(EXPRESSION)
                await publisher.publish(BAD)
                assert (await anext(subscription)).payload == BAD


async def test_a_handler_never_receives_an_invalid_event_and_its_cursor_moves_past_it(log_path: Path) -> None:
    await store_before(log_path, GOOD, BAD, BAD, GOOD)
    seen: list[int] = []
    async with zbus.open(log_path) as bus:

        @bus.on("shop/**", durable="billing", start="beginning")
        async def bill(event: zbus.Event) -> None:
            seen.append(event.offset)

        await until(lambda: seen == [1, 4])
        assert bus.stats()["invalid_schema"] == 2
        assert "invalid_payloads" not in bus.stats()
        assert "handler_errors" not in bus.stats()
    async with zbus.open(log_path) as bus:
        (cursor,) = node_of(bus).need_log("").cursors.list()
        assert (cursor.name, cursor.offset) == ("billing", 4)


async def test_a_durable_subscriber_acknowledges_an_invalid_event_by_requesting_the_next(log_path: Path) -> None:
    await store_before(log_path, BAD, GOOD)
    async with zbus.open(log_path) as bus:
        async with bus.subscribe("**", durable="audit", start="beginning") as subscription:
            with pytest.raises(zbus.SchemaInvalid):
                await anext(subscription)
            assert (await anext(subscription)).offset == 2
        async with bus.subscribe("**", durable="audit") as subscription:
            assert (await anext(subscription)).offset == 2  # it was handed over, and not acknowledged yet


async def test_a_read_only_bus_validates_events(log_path: Path) -> None:
    await store_before(log_path, GOOD, BAD, GOOD)
    async with zbus.open(log_path, read_only=True) as bus:
        async with bus.subscribe("**", start="beginning") as subscription:
            first, second, third = await read_all(subscription, 3)
    assert (first, third) == (1, 3)
    assert isinstance(second, zbus.SchemaInvalid)


async def test_replay_returns_invalid_events_too(log_path: Path) -> None:
    await store_before(log_path, GOOD, BAD)
    async with zbus.open(log_path) as bus:
        assert [event.payload async for event in bus.replay("**")] == [GOOD, BAD]


async def test_with_validate_schemas_off_nothing_is_validated(log_path: Path) -> None:
    await store_before(log_path, GOOD, BAD)
    async with zbus.open(log_path, validate_schemas=False) as bus:
        assert node_of(bus).validators is None
        await (await bus.publisher(KEY)).publish(b"nonsense")
        async with bus.subscribe("**", start="beginning") as subscription:
            assert await read_all(subscription, 3) == [1, 2, 3]


async def test_reading_takes_the_fast_path_while_no_schema_is_active(log_path: Path) -> None:
    async with zbus.open(log_path, tracing="off") as bus, bus.subscribe("**") as subscription:
        assert subscription._plain
        await bus.schemas.register(EXPRESSION, Order)
        assert not subscription._plain
        async with bus.subscribe("**") as later:
            assert not later._plain
        await bus.schemas.remove(EXPRESSION)
        assert subscription._plain


def test_a_blocking_subscriber_receives_the_error_in_order(log_path: Path) -> None:
    asyncio.run(store_before(log_path, GOOD, BAD, GOOD))
    with zbus.blocking.open(log_path) as bus, bus.subscribe("**", start="beginning") as subscription:
        assert next(subscription).offset == 1
        with pytest.raises(zbus.SchemaInvalid):
            next(subscription)
        assert next(subscription).offset == 3
