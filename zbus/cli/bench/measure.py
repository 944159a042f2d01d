"""The measurements of `zbus bench`: one per function, each for a given time, on the disk of a folder."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import zbus

from .quantiles import quantile

PAYLOAD = b"x" * 100
PUBLISHERS = 256
BATCH_EVENTS = 1000

Results = dict[str, float]


def _embedded(log: Path | None = None) -> zbus.Bus:
    """Return an embedded bus, with fsync if it has a log, without the settings of the environment."""
    return zbus.open(config=zbus.BusConfig.exactly(log=None if log is None else str(log)))


async def many_publishers(folder: Path, seconds: float) -> Results:
    """Measure durable publishes per second, from 256 publishers that each await every one."""
    async with _embedded(folder / "many.db") as bus:
        publishers = [await bus.publisher(f"bench/many/{number}") for number in range(PUBLISHERS)]
        deadline = time.perf_counter() + seconds

        async def publish(publisher: zbus.EventPublisher) -> int:
            while time.perf_counter() < deadline:
                await publisher.publish(PAYLOAD)
            return publisher.sequence

        begun = time.perf_counter()
        published = sum(await asyncio.gather(*map(publish, publishers)))
        return {"durable_publishes_per_s": published / (time.perf_counter() - begun)}


async def one_publisher(folder: Path, seconds: float) -> Results:
    """Measure how long one publisher waits for each durable publish."""
    taken_ns: list[int] = []
    async with _embedded(folder / "one.db") as bus:
        publisher = await bus.publisher("bench/one")
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            begun = time.perf_counter_ns()
            await publisher.publish(PAYLOAD)
            taken_ns.append(time.perf_counter_ns() - begun)
    return {
        "awaited_publish_us_p50": quantile(taken_ns, 0.5) / 1000,
        "awaited_publish_us_p99": quantile(taken_ns, 0.99) / 1000,
    }


async def batches(folder: Path, seconds: float) -> Results:
    """Measure durable events per second through `publish_many`. `replay` reads the same log afterwards."""
    async with _embedded(folder / "batches.db") as bus:
        publisher = await bus.publisher("bench/batches")
        begun = time.perf_counter()
        while time.perf_counter() < begun + seconds:
            await publisher.publish_many([PAYLOAD] * (10 * BATCH_EVENTS))
        return {"publish_many_events_per_s": publisher.sequence / (time.perf_counter() - begun)}


async def no_log(folder: Path, seconds: float) -> Results:
    """Measure events per second from `publish` to `async for`, without a log."""
    async with _embedded() as bus, bus.subscribe("bench/**", overflow="block") as subscriber:
        publisher = await bus.publisher("bench/live")
        begun = time.perf_counter()

        async def publish() -> None:
            while time.perf_counter() < begun + seconds:
                await publisher.publish(PAYLOAD)
            await subscriber.aclose()

        publishing = asyncio.create_task(publish())
        received = 0
        async for _ in subscriber:
            received += 1
        await publishing
        return {"delivered_without_log_per_s": received / (time.perf_counter() - begun)}


async def replay(folder: Path, seconds: float) -> Results:
    """Measure how many stored events per second a replay yields."""
    async with _embedded(folder / "batches.db") as bus:
        begun, read = time.perf_counter(), 0
        while time.perf_counter() < begun + seconds:
            async for _ in bus.replay("**"):
                read += 1
                if not read % BATCH_EVENTS and time.perf_counter() >= begun + seconds:
                    break
        return {"replayed_events_per_s": read / (time.perf_counter() - begun)}
