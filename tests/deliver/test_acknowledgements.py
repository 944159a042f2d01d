"""A durable subscription holds the lease of its name: it acknowledges with it, and only while it has it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from mesh_fakes import recorded

import zbus
from zbus.deliver.acknowledgements import Acknowledgements
from zbus.errors import LogError
from zbus.util.runtime import REAL
from zbus_log.file import sqlite_driver


@pytest.fixture
async def bus(log_path: Path) -> AsyncIterator[zbus.Bus]:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/b")).publish_many([b"%d" % n for n in range(10)])
        yield bus


def give_the_lease_to_another(log_path: Path, name: str) -> None:
    """As if another process had claimed the name after somebody removed the folder of leases."""
    connection = sqlite_driver.connect(f"{log_path}-cursors")
    connection.execute("UPDATE cursors SET token = 'of another' WHERE name = ?", (name,))
    connection.close()


def position(bus: zbus.Bus, name: str) -> int:
    log = node_of(bus).log
    assert log is not None
    return {cursor.name: cursor.offset for cursor in log.cursors.list()}[name]


async def test_two_subscriptions_of_one_process_cannot_hold_one_name(bus: zbus.Bus, log_path: Path) -> None:
    async with zbus.open(log_path, read_only=True) as other, bus.subscribe("**", durable="billing"):
        for each in (bus, other):
            with pytest.raises(zbus.CursorError, match="one subscriber at a time"):
                async with each.subscribe("**", durable="billing"):
                    pass
    async with zbus.open(log_path, read_only=True) as other, other.subscribe("**", durable="billing"):
        pass  # it was released


async def test_an_acknowledgement_whose_lease_is_lost_raises_and_stores_nothing(bus: zbus.Bus, log_path: Path) -> None:
    async with bus.subscribe("**", durable="billing", start="beginning") as subscription:
        first, second = await anext(subscription), await anext(subscription)
        await first.ack()
        give_the_lease_to_another(log_path, "billing")
        with recorded() as records, pytest.raises(zbus.CursorError, match="lease"):
            await second.ack()
        assert position(bus, "billing") == first.offset
        assert {record["durable"] for record in records if record["record"] == "LEASE_LOST"} == {"billing"}
    assert position(bus, "billing") == first.offset  # closing stores nothing either


async def test_reading_on_after_the_lease_is_lost_raises(bus: zbus.Bus, log_path: Path) -> None:
    """Asking for the next event acknowledges the last one; that it was not stored must not stay unknown."""
    async with bus.subscribe("**", durable="billing", start="beginning") as subscription:
        await anext(subscription)
        give_the_lease_to_another(log_path, "billing")
        publisher = await bus.publisher("a/b")
        with pytest.raises(zbus.CursorError, match="another subscriber has its lease; the position was not stored"):
            async with asyncio.timeout(20):
                while True:
                    await anext(subscription)
                    await publisher.publish(b"")
        with pytest.raises(zbus.CursorError):
            await anext(subscription)
    assert position(bus, "billing") == 0


async def test_closing_a_subscription_whose_lease_is_lost_leaves_it_to_the_new_holder(
    bus: zbus.Bus, log_path: Path
) -> None:
    async with bus.subscribe("**", durable="billing", start="beginning") as subscription:
        await anext(subscription)
        give_the_lease_to_another(log_path, "billing")

    connection = sqlite_driver.connect(f"{log_path}-cursors")
    assert connection.execute("SELECT name, token FROM cursors").fetchall() == [("billing", "of another")]
    connection.close()


async def test_a_name_that_gets_more_keys_reports_that_their_events_before_its_position_are_not_delivered(
    bus: zbus.Bus,
) -> None:
    async def read(*keys: str) -> list[str]:
        with recorded() as records:
            async with bus.subscribe(*keys, durable="billing", start="beginning") as subscription:
                event = await anext(subscription)
                await event.ack()
        found = [record for record in records if record["record"] == "DURABLE_KEYS_ADDED"]
        assert [(record["durable"], record["code"]) for record in found] == [("billing", "keys_added")] * len(found)
        return [record["reason"] for record in found]

    await (await bus.publisher("c/d")).publish(b"")
    assert await read("a/*") == []  # a new name
    assert await read("a/**", "a/b") == [
        "the durable subscription 'billing' did not have the key expressions a/** before: their events up to offset 1 "
        "are not delivered. To receive them, use another name, or move its position: zbus log cursors LOG --reset NAME "
        "--to OFFSET"
    ]
    assert await read("a/*", "a/b/**") == []  # fewer
    (reason,) = await read("c/*", "a/b")
    assert "the key expressions c/* before" in reason


# Waiting for the cursors' thread.


class FakeCursors:
    """Stores positions on a thread of its own when the test says so."""

    def __init__(self) -> None:
        self.advanced: list[int] = []
        self._done: list[Callable[[Any], object]] = []

    def advance(self, name: str, token: str, offset: int, done: Callable[[Any], object] | None = None) -> None:
        self.advanced.append(offset)
        if done is not None:
            self._done.append(done)

    def store(self, error: LogError | None = None) -> None:
        def run() -> None:
            for done in self._done:
                done(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def durable(cursors: FakeCursors) -> Acknowledgements:
    return Acknowledgements(cursors, lambda *call: None, "billing", ["**"], REAL)  # type: ignore[arg-type, return-value]


async def test_many_acknowledgements_return_once_their_positions_are_stored() -> None:
    cursors = FakeCursors()
    name = durable(cursors)
    waiting = [asyncio.ensure_future(name.acknowledge(offset)) for offset in range(1, 6)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)

    cursors.store()
    assert name._calls is not None
    assert len(name._calls._mailbox) == 5  # for the loop: the cursors' thread settles no future
    await asyncio.wait_for(asyncio.gather(*waiting), 5)

    assert (cursors.advanced, name.acknowledged) == ([1, 2, 3, 4, 5], 5)


async def test_a_position_that_could_not_be_stored_raises_and_a_cancelled_wait_is_left_alone() -> None:
    cursors = FakeCursors()
    name = durable(cursors)
    failing, cancelled = (asyncio.ensure_future(name.acknowledge(offset)) for offset in (1, 2))
    await asyncio.sleep(0)
    cancelled.cancel()

    cursors.store(LogError("the disk is full"))

    with pytest.raises(LogError, match="full"):
        await asyncio.wait_for(failing, 5)
    assert cancelled.cancelled()
