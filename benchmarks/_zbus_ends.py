"""The two ends with zbus, without a log: one process awaits `publish` in a loop, another reads with `async for`."""

from __future__ import annotations

import asyncio
from typing import Any

from _ends import QUEUE_EVENTS, Plan, ReceiveCounter, publish_in_turns, report, wait_for_turn

import zbus

KEY = "bench/orders/created"


async def subscriber(settings: dict[str, Any], **plan: int) -> None:
    """Run the receiving end. All events must arrive, and none may be dropped."""
    counter = ReceiveCounter(Plan(**plan))
    async with zbus.open(**settings) as bus, bus.subscribe(KEY, queue_events=QUEUE_EVENTS) as subscription:
        report(ready=True)
        async for event in subscription:
            if counter.take(event.payload):
                break
        wrong = {name: events for name, events in bus.stats().items() if name.startswith(("dropped", "gaps"))}
        if wrong or subscription.dropped:
            raise RuntimeError(f"not everything arrived as it should: {wrong}")
        await asyncio.to_thread(wait_for_turn)


async def publisher(settings: dict[str, Any], many: bool = False, **plan: int) -> None:
    """Run the publishing end."""
    async with zbus.open(**settings) as bus:
        made = await bus.publisher(KEY)
        report(ready=True)
        await publish_in_turns(Plan(**plan), made.publish, many=made.publish_many if many else None)


def peer_to_peer(port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of two Zenoh nodes, of which the first listens."""
    endpoint = [f"tcp/127.0.0.1:{port}"]
    return {"mode": "peer", "listen": endpoint}, {"mode": "peer", "connect": endpoint}
