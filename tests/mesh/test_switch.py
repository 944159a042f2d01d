"""From one transport to another at run time: nothing is lost, nothing comes twice, and the order is kept.

All pairs of transports have their turn in `tests/faults/test_mesh_faults.py`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from mesh_lossy import Buses, buses_on, eventually, nothing_more, take, wanted
from mesh_support import Nats, ZenohRouter, Zmq
from mesh_switch import both_switch, forth_and_back, old_and_new_mesh

import zbus
from zbus import plugins
from zbus.config import BusConfig
from zbus.mesh import network as network_module
from zbus.mesh.send_queue import SendQueue
from zbus.ports.fabric import Fabric

pytestmark = pytest.mark.timeout(120)


def test_both_nodes_switch_under_load_at_different_moments(tmp_path: Path) -> None:
    with old_and_new_mesh(tmp_path, ZenohRouter, Nats) as (mesh, new):
        both_switch(mesh, new, "publisher-first")


def test_a_reader_moves_forth_and_back_between_two_transports_under_load(tmp_path: Path) -> None:
    with old_and_new_mesh(tmp_path, ZenohRouter, Nats) as (mesh, new):
        forth_and_back(mesh, new)


@pytest.fixture
async def old_and_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Buses, Buses]]:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    async with (
        buses_on(Zmq, tmp_path / "old", monkeypatch) as old,
        buses_on(Nats, tmp_path / "new", monkeypatch) as new,
    ):
        yield old, new


async def test_what_is_committed_while_a_transport_is_added_goes_over_it_too(
    old_and_new: tuple[Buses, Buses], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between opening a link and using it is made long here; a reader hears on the new transport alone."""
    old, new = old_and_new

    class SlowSendQueue(SendQueue):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            time.sleep(0.5)

    a = await old.open("a")
    b = await new.open("b", log=False)
    publisher = await a.publisher("shop/orders")
    async with b.subscribe("shop/**") as subscription:
        monkeypatch.setattr(network_module, "SendQueue", SlowSendQueue)
        switching = asyncio.create_task(a.switch_transport(new.wire.url, overlap_s=0.1))
        while not switching.done():
            await publisher.publish(b"")
            await asyncio.sleep(0.01)
        await switching
        await publisher.publish_many([b""] * 5)
        first = (await take(subscription, 1))[0].sequence
        rest = await take(subscription, publisher.sequence - first - 1, 5)
        assert [event.sequence for event in rest] == list(range(first + 1, publisher.sequence))


class SlowToBring:
    """A fabric whose frames arrive later than those of another."""

    def __init__(self, fabric: Fabric, delay_s: float) -> None:
        self._fabric, self._delay_s, self._loop = fabric, delay_s, asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)

    def listen(self, expressions: Sequence[str], receive: Callable[..., None]) -> None:
        def received(frame: bytes, done: Any = None) -> None:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._delay_s, receive, frame, done)

        self._fabric.listen(expressions, received)


@pytest.mark.parametrize("logged", [True, False], ids=["with-a-log", "without-a-log"])
async def test_a_transport_that_is_slower_than_the_other_costs_no_event(
    old_and_new: tuple[Buses, Buses], monkeypatch: pytest.MonkeyPatch, logged: bool
) -> None:
    old, new = old_and_new
    loop = asyncio.get_running_loop()
    open_fabric = plugins.open_fabric
    slow: list[str] = []

    def open_slow(config: BusConfig, url: str, session: Any = None) -> Fabric:
        fabric = open_fabric(config, url, session)
        if url.startswith(tuple(slow)):
            found = SlowToBring.__new__(SlowToBring)
            found._fabric, found._delay_s, found._loop = fabric, 0.1, loop
            return found  # type: ignore[return-value]
        return fabric

    monkeypatch.setattr(plugins, "open_fabric", open_slow)
    both = [old.wire.url, new.wire.url]
    slow.append("zmq")
    b = zbus.open(transports=both)
    await b.start()
    slow.clear()
    a = await old.open("a", log=logged)
    try:
        publisher = await a.publisher("shop/orders")
        async with b.subscribe("shop/**", queue_events=10_000) as subscription:
            for number in range(100):
                await publisher.publish(b"")
                await asyncio.sleep(0.005)
                if number == 50:  # from here on the faster transport carries the same, and overtakes
                    await node_of(a).link(new.wire.url)
            events = await take(subscription, 100, 5)
            assert [event.sequence for event in events] == list(range(100))
            await nothing_more(subscription)
        assert not b.stats().get("gaps_unrepaired"), b.stats()
    finally:
        await b.aclose()


async def test_a_transport_that_cannot_be_opened_leaves_the_old_one_in_use(old_and_new: tuple[Buses, Buses]) -> None:
    old, _ = old_and_new
    a, b = await old.open("a"), await old.open("b", log=False)
    async with b.subscribe("shop/**") as subscription:
        with pytest.raises(zbus.ZbusError):
            async with asyncio.timeout(15):
                await a.switch_transport("zmq://?registry=/proc/no/such/folder", overlap_s=0.1)
        await (await a.publisher("shop/orders")).publish(b"still here")
        assert [event.payload for event in await take(subscription, 1, 5)] == [b"still here"]
    assert len(a.diagnostics()["links"]) == 1


@pytest.mark.parametrize("logged", [True, False], ids=["with-a-log", "without-a-log"])
async def test_an_embedded_bus_moves_to_a_network_without_losing_or_repeating_an_event(
    old_and_new: tuple[Buses, Buses], tmp_path: Path, logged: bool
) -> None:
    """Its own readers notice nothing; those elsewhere see all that is published once it has moved."""
    _, new = old_and_new
    there = await new.open("there", log=False)
    async with zbus.open(tmp_path / "embedded.db" if logged else None) as bus, there.subscribe("shop/**") as far:
        assert "links" not in bus.diagnostics()
        publisher = await bus.publisher("shop/orders")
        async with bus.subscribe("shop/**", queue_events=10_000) as near:
            switching = asyncio.create_task(bus.switch_transport(new.wire.url, overlap_s=0.1))
            while not switching.done():
                await publisher.publish(b"")
                await asyncio.sleep(0.001)
            await switching
            await wanted(bus, "shop/orders")
            moved = publisher.sequence
            await publisher.publish_many([b"moved"] * 50)
            assert [event.sequence for event in await take(near, moved + 50)] == list(range(moved + 50))
            came = [event.sequence for event in await take(far, 50)]
            while came[-1] < moved + 49:
                came += [event.sequence for event in await take(far, 1)]
            assert came == list(range(came[0], moved + 50))
            assert came[0] <= moved
            assert [link["fabric"] for link in bus.diagnostics()["links"]] == ["nats"]
            await (await there.publisher("shop/back")).publish(b"and back")
            assert [event.payload for event in await take(near, 1)] == [b"and back"]


async def test_a_switch_that_is_cancelled_half_way_leaves_both_in_use(old_and_new: tuple[Buses, Buses]) -> None:
    old, new = old_and_new
    a = await old.open("a")
    on_old, on_new = await old.open("on-old", log=False), await new.open("on-new", log=False)
    async with on_old.subscribe("shop/**") as by_old, on_new.subscribe("shop/**") as by_new:
        switching = asyncio.create_task(a.switch_transport(new.wire.url, overlap_s=60))
        await eventually(lambda: len(a.diagnostics()["links"]) == 2)
        switching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await switching

        assert [link["fabric"] for link in a.diagnostics()["links"]] == ["zmq", "nats"]
        await wanted(a, "shop/orders")
        publisher = await a.publisher("shop/orders")
        await publisher.publish_many([b"by both"] * 20)
        for subscription in (by_old, by_new):
            assert [event.sequence for event in await take(subscription, 20)] == list(range(20))
        async with a.subscribe("back/**") as back:
            for each in (on_old, on_new):
                await wanted(each, "back/x")
                await (await each.publisher("back/x")).publish(b"back")
            assert len(await take(back, 2)) == 2

        await a.receive_on()  # and it still works as a bus of two transports: one can be left by hand
        assert node_of(a).network is not None
        await node_of(a).network.remove(node_of(a).network.links[0], 2.0)
        await publisher.publish(b"by the new one")
        assert [event.payload for event in await take(by_new, 1)] == [b"by the new one"]


async def test_a_switch_that_is_cancelled_while_the_new_transport_is_opened_leaves_the_old_one_alone(
    old_and_new: tuple[Buses, Buses], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = old_and_new
    a, b = await old.open("a"), await old.open("b", log=False)
    open_fabric, opening, go_on = plugins.open_fabric, threading.Event(), threading.Event()
    opened: list[Fabric] = []

    def open_late(config: BusConfig, url: str, session: Any = None) -> Fabric:
        opening.set()
        go_on.wait(20)
        opened.append(open_fabric(config, url, session))
        return opened[-1]

    monkeypatch.setattr(plugins, "open_fabric", open_late)
    switching = asyncio.create_task(a.switch_transport(new.wire.url, overlap_s=0.1))
    assert await asyncio.to_thread(opening.wait, 20)
    switching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await switching
    go_on.set()

    await eventually(lambda: opened)
    await eventually(lambda: not opened[0].ready("shop/orders"), reported=lambda: "it is still connected")
    assert [link["fabric"] for link in a.diagnostics()["links"]] == ["zmq"]
    async with b.subscribe("shop/**") as subscription:
        await wanted(a, "shop/orders")
        await (await a.publisher("shop/orders")).publish(b"still here")
        assert [event.payload for event in await take(subscription, 1)] == [b"still here"]


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05, 0.2])
async def test_closing_while_a_new_transport_opens_leaves_no_transport_behind(tmp_path: Path, delay_s: float) -> None:
    old, new = (tmp_path / name for name in ("old", "new"))
    old.mkdir(mode=0o700)
    new.mkdir(mode=0o700)
    bus = zbus.open(transport=f"zmq://?registry={old}", close_timeout_s=3)
    await bus.start()
    switching = asyncio.ensure_future(bus.switch_transport(f"zmq://?registry={new}", overlap_s=0.1))
    await asyncio.sleep(delay_s)
    await bus.aclose()
    await asyncio.wait([switching])
    switching.exception()

    await eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("zbus")])
    assert list(new.iterdir()) == []  # its lease is not renewed by a thread that was left behind
