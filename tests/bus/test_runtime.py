"""A node takes the time, chance and its identity from the runtime that it was given, and from nothing else."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from zbus.config import BusConfig
from zbus.node import Node
from zbus.observe.records import EVENT_RETRY, record
from zbus.publish.publisher import EventPublisher
from zbus.util.runtime import REAL, Runtime

NOW_NS = 1_700_000_000 * 10**9


class OwnRuntime(Runtime):
    """The real threads, but a clock of its own that stands still, and numbers that rise."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0
        self.threads: list[str] = []
        self.time_ns = lambda: NOW_NS
        self.randbits = self._draw
        self.pid = lambda: 4711
        self.hostname = lambda: "elsewhere"

    def executor(self, threads: int, name: str) -> Any:
        self.threads.append(name)
        return super().executor(threads, name)

    def thread(self, target: Any, name: str) -> Any:
        self.threads.append(name)
        return super().thread(target, name)

    def _draw(self, bits: int) -> int:
        self.drawn += 1
        return self.drawn


async def test_events_records_schemas_and_announcements_have_the_node_s_own_time_and_chance(log_path: Path) -> None:
    runtime = OwnRuntime()
    config = BusConfig(log=str(log_path), system_events="warning", node_ttl_s=60)
    node = Node(config, runtime=runtime)
    await node.start()
    try:
        schema = await node.schemas.register("shop/*", {"type": "object"})
        records = node.subscribe("@zbus/record/*")
        events = node.subscribe("shop/*")
        publisher = EventPublisher(node.entry, "shop/x")
        await publisher.publish({})
        record(EVENT_RETRY, logging.WARNING)
        async with asyncio.timeout(10):
            event, reported = await anext(events), await anext(records)
        assert node.network is not None
        own = node.network.registry.nodes()[0]
    finally:
        await node.aclose()

    times = (schema.registered_at_ns, event.published_at, reported.published_at, own.started_at, own.last_seen)
    assert times == (NOW_NS,) * 5
    assert {event.publisher_id, reported.publisher_id} <= set(range(1, runtime.drawn + 1))
    assert (own.host, own.pid, own.name) == ("elsewhere", 4711, "elsewhere:4711")
    assert {"zbus-read", "zbus-declare", "zbus-request", "zbus-close"} <= set(runtime.threads)


async def test_two_nodes_of_one_process_have_different_clocks() -> None:
    skewed = Runtime()
    skewed.time_ns = lambda: REAL.time_ns() + 3600 * 10**9
    nodes = [Node(BusConfig(), runtime=runtime) for runtime in (REAL, skewed)]
    found = []
    for node in nodes:
        await node.start()
    try:
        for node in nodes:
            events = node.subscribe("a")
            await EventPublisher(node.entry, "a").publish(b"")
            found.append((await anext(events)).published_at)
    finally:
        for node in nodes:
            await node.aclose()

    assert found[1] - found[0] > 3500 * 10**9
