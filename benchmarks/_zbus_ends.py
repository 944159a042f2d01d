"""zbus as it is used: one process awaits `publish` in a loop, another reads with `async for`. No log on either."""

from __future__ import annotations

import asyncio
from typing import Any

from _ends import QUEUE_EVENTS, Plan, Receipt, publish_in_turns, say, told

import zbus

KEY = "bench/orders/created"


async def subscriber(settings: dict[str, Any], **plan: int) -> None:
    """The receiving end; everything must arrive, and nothing may have been dropped on the way."""
    receipt = Receipt(Plan(**plan))
    async with zbus.open(**settings) as bus, bus.subscribe(KEY, queue_events=QUEUE_EVENTS) as subscription:
        say(ready=True)
        async for event in subscription:
            if receipt.take(event.payload):
                break
        wrong = {name: events for name, events in bus.stats().items() if name.startswith(("dropped", "gaps"))}
        if wrong or subscription.dropped:
            raise RuntimeError(f"not everything arrived as it should: {wrong}")
        await asyncio.to_thread(told)


async def publisher(settings: dict[str, Any], many: bool = False, **plan: int) -> None:
    """The publishing end."""
    async with zbus.open(**settings) as bus:
        made = await bus.publisher(KEY)
        say(ready=True)
        await publish_in_turns(Plan(**plan), made.publish, many=made.publish_many if many else None)


def peer_to_peer(port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of two nodes on Zenoh, of which the first listens."""
    endpoint = [f"tcp/127.0.0.1:{port}"]
    return {"mode": "peer", "listen": endpoint}, {"mode": "peer", "connect": endpoint}
