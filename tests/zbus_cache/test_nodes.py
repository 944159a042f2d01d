"""Invalidation by events of other nodes, on every transport, with and without a log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inside import node_of
from mesh_lossy import Buses, Losses, buses_on, wanted
from mesh_support import WIRES, Wire

KEY = "events/Todo/7"


@pytest.fixture(params=WIRES, ids=lambda kind: kind.name)
async def buses(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Buses]:
    kind: type[Wire] = request.param
    async with buses_on(kind, tmp_path, monkeypatch) as buses:
        yield buses


async def loader() -> int:
    return 1


@pytest.mark.parametrize("log", [False, True])
async def test_an_event_of_another_node_invalidates_the_entry_before_any_subscriber_receives_it(
    buses: Buses, log: bool
) -> None:
    a, b = await buses.open("a", log=log), await buses.open("b", log=log)
    cache = b.cache().invalidate_on("events/Todo/{id}", entry="{id}")
    await cache.load("7", loader)
    await cache.load("8", loader)
    async with b.subscribe("events/**") as subscription:
        await wanted(a, KEY)
        await (await a.publisher(KEY)).publish(b"")
        async with asyncio.timeout(20):
            await anext(subscription)
        assert cache.get("7") is None
        assert cache.get("8") == 1


async def test_a_cache_receives_events_without_any_subscriber(buses: Buses) -> None:
    a, b = await buses.open("a"), await buses.open("b")

    @b.cached(invalidate_on=KEY)
    async def todo() -> int:
        return 1

    await todo()
    await wanted(a, KEY)
    await (await a.publisher(KEY)).publish(b"")
    async with asyncio.timeout(20):
        while todo.cache.stats()["entries"]:
            await asyncio.sleep(0.01)
    assert todo.cache.stats()["invalidations"] == 1


async def test_an_event_that_is_stored_first_invalidates_the_entry_too(buses: Buses) -> None:
    a, b = await buses.open("a"), await buses.open("b")
    cache = b.cache().invalidate_on("events/**")
    async with b.subscribe("events/**", durable="d") as durable:
        await cache.load("a", loader)
        await wanted(a, KEY)
        await (await a.publisher(KEY)).publish(b"")
        async with asyncio.timeout(20):
            await anext(durable)
        assert cache.get("a") is None


async def test_permanently_lost_events_invalidate_all_entries(buses: Buses) -> None:
    losses = Losses()
    a, b = await buses.open("a", log=False), await buses.open("b", losses=losses)
    cache = b.cache().invalidate_on("events/Todo/{id}", entry="{id}")
    async with b.subscribe(KEY) as subscription:
        await wanted(a, KEY)
        publisher = await a.publisher(KEY)
        await publisher.publish(b"")
        async with asyncio.timeout(20):
            await anext(subscription)
        await cache.load("7", loader)
        await cache.load("8", loader)
        losses.of_events = lambda sequences: True
        await publisher.publish(b"")
        async with asyncio.timeout(30):
            while cache.get("7") is not None:
                await asyncio.sleep(0.01)
        assert losses.events_lost
        assert cache.get("8") is None


async def test_nothing_is_loaded_before_the_transports_have_subscribed(
    buses: Buses, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await buses.open("a")
    assert node_of(a).network is not None
    listening: list[str] = []
    for link in node_of(a).network.links:
        listen = link.fabric.listen

        def listen_and_note(expressions: list[str], receive: object, listen: object = listen) -> None:
            listen(expressions, receive)  # type: ignore[operator]
            listening.extend(expressions)

        monkeypatch.setattr(link.fabric, "listen", listen_and_note)

    @a.cached(invalidate_on=KEY)
    async def todo() -> list[str]:
        return list(listening)

    assert KEY in await todo()


async def test_a_closed_cache_has_no_interest_in_events(buses: Buses) -> None:
    b = await buses.open("b")
    cache = b.cache().invalidate_on(KEY)
    await cache.ready()
    assert node_of(b).network is not None
    assert node_of(b).network.interest.expressions == (KEY,)
    await cache.aclose()
    assert node_of(b).network.interest.expressions == ()
