"""Sample traffic for `zbus serve --demo`: a shop and some trucks."""

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
    """Publish sample events until cancelled: orders and their payments, and the positions of trucks.

    A slow durable subscriber reads the orders. Two runs with the same `seed` differ only in their times.
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
    declined = await bus.publisher("audit/payments/declined")
    for number in itertools.count(1):
        order: dict[str, Any] = {"id": number, "sku": chance.choice(SKUS), "price": round(chance.uniform(2, 90), 2)}
        common: dict[str, Any] = {
            "correlation_id": f"order-{number}",
            "headers": {"region": chance.choice(("eu", "us"))},
        }
        await created.publish(order, **common)
        await asyncio.sleep(chance.uniform(0.5, 1.5) * 3 / EVENTS_PER_S)
        if chance.random() < 0.05:
            await declined.publish({"id": number, "reason": "the card was declined"}, **common)
            continue
        await paid.publish({"id": number, "price": order["price"]}, **common)
        await settled.publish({"id": number}, **common)


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
    """Run a durable subscriber that lags a little, so that the console has a cursor to show."""
    async with bus.subscribe("shop/orders/*", durable="demo-billing") as orders:
        async for _ in orders:
            await asyncio.sleep(0.05)
