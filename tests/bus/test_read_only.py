"""Following a log that another process owns: live events, durable names, and no publishing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from inside import node_of

import zbus


async def test_a_reader_follows_the_owner_as_it_writes(log_path: Path) -> None:
    async with zbus.open(log_path) as owner, zbus.open(log_path, read_only=True) as reader:
        publisher = await owner.publisher("a/b")
        async with reader.subscribe("a/**") as subscription, reader.subscribe("a/**", start="beginning") as all_of_it:
            await publisher.publish_many([b""] * 2000)
            async with asyncio.timeout(20):
                live = [(await anext(subscription)).offset for _ in range(2000)]
                await publisher.publish(b"")
                everything = [(await anext(all_of_it)).offset for _ in range(2001)]

        assert live == list(range(1, 2001))
        assert everything == list(range(1, 2002))
        assert await reader.head() == 2001
        assert len([event async for event in reader.replay("a/*", after=1990)]) == 11


async def test_a_reader_keeps_durable_positions_of_its_own(log_path: Path) -> None:
    async with zbus.open(log_path) as owner:
        await (await owner.publisher("a/b")).publish_many([b""] * 10)
        for expected in (1, 2, 3):
            async with zbus.open(log_path, read_only=True) as reader:
                async with reader.subscribe("**", start="beginning", durable="x") as subscription:
                    event = await anext(subscription)
                    await event.ack()
                    assert event.offset == expected


async def test_a_reader_cannot_publish_and_says_who_can(log_path: Path) -> None:
    async with zbus.open(log_path):
        async with zbus.open(log_path, read_only=True) as reader:
            publisher = await reader.publisher("a/b")
            with pytest.raises(zbus.LogReadOnly, match="not stored"):
                await publisher.publish(b"x")


async def test_what_a_reader_cannot_publish_uses_up_no_sequence_and_is_neither_counted_nor_announced(
    log_path: Path,
) -> None:
    async with zbus.open(log_path), zbus.open(log_path, read_only=True) as reader:
        publisher, session = await reader.publisher("a/b"), reader.session("s")
        rejected: list[zbus.LogReadOnly] = []
        for publish in (
            lambda: publisher.publish(b"x"),
            lambda: publisher.publish(object()),  # before the payload is looked at
            lambda: publisher.publish_many([b"x"] * 4),
            lambda: session.publish("a/b", b"x"),
            lambda: reader.put(zbus.Event(7, 0, 1, "a/b", b"x")),
        ):
            with pytest.raises(zbus.LogReadOnly) as caught:
                await publish()
            rejected.append(caught.value)

        assert publisher.sequence == 0
        assert [note for error in rejected for note in getattr(error, "__notes__", ())] == []
        assert not node_of(reader).entry.published_keys
        assert await reader.head() == 0


async def test_a_reader_has_no_zenoh_session_and_says_why(log_path: Path) -> None:
    async with zbus.open(log_path), zbus.open(log_path, read_only=True) as reader:
        with pytest.raises(zbus.ConfigInvalid, match=r"read-only bus has no transport: .* process that owns the log"):
            _ = reader.zenoh


async def test_a_log_that_is_not_there_cannot_be_read(log_path: Path) -> None:
    with pytest.raises(zbus.ConfigInvalid, match="there is no log"):
        await zbus.open(log_path, read_only=True).start()
    assert not log_path.exists()


async def test_a_reader_stays_when_the_owner_leaves_and_comes_back(log_path: Path) -> None:
    async with zbus.open(log_path) as owner:
        await (await owner.publisher("a/b")).publish(b"1")
    async with zbus.open(log_path, read_only=True) as reader:
        async with reader.subscribe("**", start="beginning") as subscription:
            assert (await anext(subscription)).payload == b"1"
            async with zbus.open(log_path) as owner:
                await (await owner.publisher("a/b")).publish(b"2")
                async with asyncio.timeout(10):
                    assert (await anext(subscription)).payload == b"2"
