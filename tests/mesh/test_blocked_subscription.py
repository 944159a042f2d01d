"""A blocking subscription that is not read, on every transport: everything else on its node keeps flowing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inside import node_of
from mesh_lossy import Buses, buses_on, eventually, take, wanted
from mesh_support import WIRES, ZenohPeers

import zbus
from zbus.deliver import overflow
from zbus.deliver.buffer import EVENT_BYTES

EVENTS = 100


@pytest.fixture
async def buses(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Buses]:
    async with buses_on(getattr(request, "param", ZenohPeers), tmp_path, monkeypatch) as found:
        yield found


on_every_wire = pytest.mark.parametrize("buses", WIRES, ids=[each.name for each in WIRES], indirect=True)


async def served(bus: zbus.Bus, key: str) -> zbus.Event:
    """The reply to a request, once the other node is known to serve the key."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await bus.request(key, b"", timeout=5)
            except zbus.NoResponders:
                await asyncio.sleep(0.05)


def last_seen(bus: zbus.Bus) -> int:
    """When an announcement or a beacon of another node came last; 0 if none did."""
    return max((node.last_seen for node in bus.nodes() if not node.is_self), default=0)


@on_every_wire
async def test_a_blocked_subscription_stops_nothing_else(buses: Buses) -> None:
    a, b = await buses.open("a", node_ttl_s=2.0), await buses.open("b", node_ttl_s=2.0)

    @b.serve("svc/echo")
    async def echo(request: zbus.Event) -> bytes:
        return b"pong"

    async with (
        b.subscribe("slow/**", overflow="block", queue_events=10) as blocked,
        b.subscribe("slow/**", queue_events=10_000) as same_key,
        b.subscribe("fast/**", queue_events=10_000) as other_key,
        b.subscribe("durable/**", durable="d") as durable,
    ):
        publishers = {}
        for key in ("slow/x", "fast/x", "durable/x"):
            await wanted(a, key)
            publishers[key] = await a.publisher(key)
        await publishers["slow/x"].publish_many([b"%d" % n for n in range(EVENTS)])
        await eventually(lambda: same_key.queued == EVENTS)
        assert node_of(b).backpressure.blocked

        await publishers["fast/x"].publish_many([b""] * EVENTS)
        await publishers["durable/x"].publish_many([b""] * EVENTS)

        assert len(await take(other_key, EVENTS)) == EVENTS
        assert len(await take(durable, EVENTS)) == EVENTS
        assert (await served(a, "svc/echo")).payload == b"pong"
        await eventually(lambda: last_seen(b) > 0)
        seen = last_seen(b)
        await eventually(lambda: last_seen(b) > seen)

        local = asyncio.create_task((await b.publisher("slow/x")).publish(b"local"))
        events = await take(blocked, EVENTS - 6)
        assert not local.done()
        events += await take(blocked, 7)
        assert [event.payload for event in events] == [*[b"%d" % n for n in range(EVENTS)], b"local"]
        await local
        assert (blocked.dropped, blocked.queued) == (0, 0)
    assert b.stats().get("dropped_inbox_full", 0) == 0


@on_every_wire
async def test_what_exceeds_the_backlog_of_a_blocked_subscription_is_reported_to_it_alone(
    buses: Buses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overflow, "BACKLOG_BYTES_MAX", 30 * (EVENT_BYTES + 1))
    a, b = await buses.open("a"), await buses.open("b", log=False)
    async with b.subscribe("slow/**", overflow="block", queue_events=10) as blocked, b.subscribe("slow/**") as other:
        await wanted(a, "slow/x")
        await (await a.publisher("slow/x")).publish_many([b"x"] * EVENTS)
        await eventually(lambda: other.queued == EVENTS)

        assert [event.sequence for event in await take(blocked, 40)] == list(range(40))
        with pytest.raises(zbus.SubscriberLagged) as caught:
            await anext(blocked)
        assert (caught.value.missed, blocked.dropped) == (60, 60)
        assert b.stats()["dropped_backlog_full"] == 60
        assert other.dropped == 0
        await (await a.publisher("slow/x")).publish(b"later")
        assert [event.payload for event in await take(blocked, 1)] == [b"later"]


async def test_what_exceeds_the_backlog_is_read_from_the_log_if_this_node_keeps_it(
    buses: Buses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overflow, "BACKLOG_BYTES_MAX", 30 * EVENT_BYTES)
    a, b = await buses.open("a"), await buses.open("b", keep=["slow/**"])
    async with b.subscribe("slow/**", overflow="block", queue_events=10) as blocked:
        await wanted(a, "slow/x")
        await (await a.publisher("slow/x")).publish_many([b""] * EVENTS)
        await eventually(lambda: node_of(b).dispatcher.delivered == EVENTS)
        assert not blocked.is_live

        assert [event.sequence for event in await take(blocked, EVENTS)] == list(range(EVENTS))
        assert blocked.dropped == 0
        assert b.stats()["spilled"] == 1
