"""Two buses on a transport, for what is promised to those who use a bus; without a network, one bus twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from contract_support import Mesh
from inside import node_of

import zbus
from zbus.errors import NoResponders, TransportError

WAIT_S = 20.0


def open_bus(mesh: Mesh, log: Path | str | None = None, **settings: Any) -> zbus.Bus:
    """A bus on the transport, not entered yet."""
    config, url = mesh.settings()
    mesh.opened(config)
    return zbus.open(log, transport=url, **config | settings)


@asynccontextmanager
async def two_buses(mesh: Mesh, log: Path | None = None) -> AsyncIterator[tuple[zbus.Bus, zbus.Bus]]:
    """One to publish on, which keeps the log if there is one, and one to subscribe on."""
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(open_bus(mesh, log))
        there = here if mesh.embedded else await stack.enter_async_context(open_bus(mesh))
        yield here, there


async def wanted(bus: zbus.Bus, keys: Sequence[str]) -> None:
    """Until other nodes' subscriptions to the keys are known here; at once where there are no other nodes."""
    assert node_of(bus).network is not None

    def ready(key: str) -> bool:
        try:
            assert node_of(bus).network is not None
            return all(link.fabric.ready(key) for link in node_of(bus).network.links)
        except TransportError:
            return False

    async with asyncio.timeout(WAIT_S):
        for key in keys:
            while not await node_of(bus).run(ready, key):
                await asyncio.sleep(0.005)


async def take(subscription: zbus.EventSubscriber, count: int) -> list[zbus.Event]:
    """The next events."""
    async with asyncio.timeout(WAIT_S):
        return [await anext(subscription) for _ in range(count)]


async def served(bus: zbus.Bus, key: str) -> None:
    """Wait until a node serves the key here, which takes a moment. The key's handler must echo."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await bus.request(key, b"served?", timeout=5.0)
                return
            except (NoResponders, TransportError):
                await asyncio.sleep(0.02)
