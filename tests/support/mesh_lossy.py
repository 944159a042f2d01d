"""A fabric that loses or delays chosen frames between the network and the bus, on any transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from mesh_support import Wire

import zbus
from zbus import plugins
from zbus.config import BusConfig
from zbus.ports.fabric import Fabric, Receive
from zbus.wire.envelope import BEACON, MANY, ONE, open_frame

WAIT_S = 20.0


class Losses:
    """Says which frames are lost. `of_events` and `of_beacons` get each frame and return whether to lose it."""

    def __init__(self) -> None:
        self.of_events: Callable[[list[int]], bool] = lambda sequences: False
        self.of_beacons: Callable[[bytes], bool] = lambda frame: False
        self.events_lost = self.beacons_lost = 0
        self.frames_passed = self.events_passed = 0
        self._held: list[Callable[[], None]] | None = None

    def hold(self) -> None:
        """Keep what arrives from now on."""
        self._held = []

    def let_go(self) -> None:
        """Hand over at once what was kept."""
        held, self._held = self._held or [], None
        for hand_over in held:
            hand_over()

    def arrived(self, frame: bytes, hand_over: Callable[[], None]) -> None:
        if self.passes(frame):
            if self._held is not None:
                self._held.append(hand_over)
            else:
                hand_over()

    def passes(self, frame: bytes) -> bool:
        if frame and frame[0] == BEACON:
            if self.of_beacons(frame):
                self.beacons_lost += 1
                return False
        elif frame and frame[0] in (ONE, MANY):
            sequences = [envelope.sequence for envelope in open_frame(frame)]
            if self.of_events(sequences):
                self.events_lost += len(sequences)
                return False
            self.events_passed += len(sequences)
        self.frames_passed += 1
        return True


class LossyFabric:
    """Everything is the fabric's own but what `listen` brings."""

    def __init__(self, fabric: Fabric, losses: Losses) -> None:
        self._fabric, self._losses = fabric, losses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        def received(frame: bytes, done: Callable[[], None] | None = None) -> None:
            self._losses.arrived(frame, lambda: receive(frame, done))

        self._fabric.listen(expressions, received)


class Buses:
    """Buses of this process on one transport."""

    def __init__(self, wire: Wire, directory: Path, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wire, self.directory, self._stack = wire, directory, stack
        self._losses: Losses | None = None
        open_fabric = plugins.open_fabric

        def open_lossy(config: BusConfig, url: str, session: Any = None) -> Fabric:
            fabric = open_fabric(config, url, session)
            if self._losses is not None and fabric.networked:
                return LossyFabric(fabric, self._losses)  # type: ignore[return-value]
            return fabric

        monkeypatch.setattr(plugins, "open_fabric", open_lossy)

    async def open(self, name: str, *, log: bool = True, losses: Losses | None = None, **settings: Any) -> zbus.Bus:
        self._losses = losses
        path = self.directory / f"{name}.db" if log else None
        bus = zbus.open(path, **self.wire.settings(name) | settings)
        self._stack.push_async_callback(bus.aclose)
        await bus.start()
        self._losses = None
        return bus


@asynccontextmanager
async def buses_on(kind: type[Wire], directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Buses]:
    """A transport, and buses on it that close with the block."""
    wire = kind(directory)
    await asyncio.to_thread(wire.start)
    try:
        async with AsyncExitStack() as stack:
            yield Buses(wire, directory, stack, monkeypatch)
    finally:
        await asyncio.to_thread(wire.stop)


async def wanted(bus: zbus.Bus, key: str) -> None:
    """Until this bus knows that another node wants `key`."""
    assert node_of(bus).network is not None
    async with asyncio.timeout(WAIT_S):
        while not all([await node_of(bus).run(link.fabric.ready, key) for link in node_of(bus).network.links]):
            await asyncio.sleep(0.005)


async def take(subscription: zbus.EventSubscriber, count: int, wait_s: float = WAIT_S) -> list[zbus.Event]:
    """The next events; fewer, if they do not come in time."""
    events: list[zbus.Event] = []
    try:
        async with asyncio.timeout(wait_s):
            while len(events) < count:
                events.append(await anext(subscription))
    except TimeoutError:
        pass
    return events


async def nothing_more(subscription: zbus.EventSubscriber, for_s: float = 0.5) -> None:
    """That no further event comes for a while."""
    more = await take(subscription, 1, for_s)
    assert not more, f"came again or too much: {more[0].key} {more[0].publisher_id} {more[0].sequence}"


async def eventually(
    true: Callable[[], Any], wait_s: float = WAIT_S, reported: Callable[[], Any] | None = None
) -> None:
    """Wait until it is true. If it stays false, the failure contains the result of `reported`."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while not true():
        assert asyncio.get_running_loop().time() < deadline, (
            f"not within {wait_s:g} s: {reported() if reported else true}"
        )
        await asyncio.sleep(0.01)
