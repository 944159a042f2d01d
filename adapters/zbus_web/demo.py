"""Sample traffic for `zbus serve --demo`: a shop and some trucks, so that a newcomer sees it move."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from typing import Any

import zbus

EVENTS_PER_S = 25
TRUCKS = 4
SKUS = ("tea", "coffee", "cups", "kettle")


async def play(bus: zbus.Bus, *, seed: int = 7) -> None:
    """Publish until cancelled: orders that are paid and settled, positions of trucks, and a slow durable reader.

    What is played follows from `seed`, so that two runs look alike; only their times differ.
    """
    async with asyncio.TaskGroup() as group:
        group.create_task(_shop(bus, random.Random(seed)))
        for truck in range(1, TRUCKS + 1):
            group.create_task(_truck(bus, truck, random.Random(seed + truck)))
        group.create_task(_bill(bus))


async def _shop(bus: zbus.Bus, chance: random.Random) -> None:
    created = await bus.publisher("shop/orders/created")
    paid = await bus.publisher("shop/orders/paid")
    settled = await bus.publisher("shop/payments/settled")
    refused = await bus.publisher("audit/payments/refused")
    for number in itertools.count(1):
        order: dict[str, Any] = {"id": number, "sku": chance.choice(SKUS), "price": round(chance.uniform(2, 90), 2)}
        told: dict[str, Any] = {"correlation_id": f"order-{number}", "headers": {"region": chance.choice(("eu", "us"))}}
        await created.publish(order, **told)
        await asyncio.sleep(chance.uniform(0.5, 1.5) * 3 / EVENTS_PER_S)
        if chance.random() < 0.05:
            await refused.publish({"id": number, "reason": "the card was refused"}, **told)
            continue
        await paid.publish({"id": number, "price": order["price"]}, **told)
        await settled.publish({"id": number}, **told)


async def _truck(bus: zbus.Bus, number: int, chance: random.Random) -> None:
    position = await bus.publisher(f"fleet/truck-{number}/position")
    fuel = await bus.publisher(f"fleet/truck-{number}/fuel")
    for step in itertools.count():
        angle = step / 40 + number
        await position.publish({"lat": round(52 + math.sin(angle) / 5, 5), "lon": round(13 + math.cos(angle) / 3, 5)})
        if step % 20 == 0:
            await fuel.publish({"litres": round(300 - step % 2000 / 10, 1)})
        await asyncio.sleep(chance.uniform(0.5, 1.5) * TRUCKS / (EVENTS_PER_S / 2))


async def _bill(bus: zbus.Bus) -> None:
    """A durable reader that is a little behind, so that there is a cursor to look at."""
    async with bus.subscribe("shop/orders/*", durable="demo-billing") as orders:
        async for _ in orders:
            await asyncio.sleep(0.05)
