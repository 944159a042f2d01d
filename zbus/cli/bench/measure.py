"""What `zbus bench` measures: one question a function, each for a given time, on a folder's disk."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import zbus

from .quantiles import quantile

PAYLOAD = b"x" * 100
PUBLISHERS = 256
BATCH_EVENTS = 1000

Figures = dict[str, float]


def _alone(log: Path | None = None) -> zbus.Bus:
    """An embedded bus, with fsync if it has a log, whatever the environment says."""
    return zbus.open(config=zbus.BusConfig.exactly(log=None if log is None else str(log)))


async def many_publishers(folder: Path, seconds: float) -> Figures:
    """How many durable publishes a second, from 256 publishers that each await every one?"""
    async with _alone(folder / "many.db") as bus:
        publishers = [await bus.publisher(f"bench/many/{number}") for number in range(PUBLISHERS)]
        deadline = time.perf_counter() + seconds

        async def publish(publisher: zbus.EventPublisher) -> int:
            while time.perf_counter() < deadline:
                await publisher.publish(PAYLOAD)
            return publisher.sequence

        begun = time.perf_counter()
        published = sum(await asyncio.gather(*map(publish, publishers)))
        return {"durable_publishes_per_s": published / (time.perf_counter() - begun)}


async def one_publisher(folder: Path, seconds: float) -> Figures:
    """How long does one publisher wait for each durable publish?"""
    taken_ns: list[int] = []
    async with _alone(folder / "one.db") as bus:
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


async def batches(folder: Path, seconds: float) -> Figures:
    """How many durable events a second through `publish_many`? What it stored is replayed by `replay`."""
    async with _alone(folder / "batches.db") as bus:
        publisher = await bus.publisher("bench/batches")
        begun = time.perf_counter()
        while time.perf_counter() < begun + seconds:
            await publisher.publish_many([PAYLOAD] * (10 * BATCH_EVENTS))
        return {"publish_many_events_per_s": publisher.sequence / (time.perf_counter() - begun)}


async def no_log(folder: Path, seconds: float) -> Figures:
    """How many events a second from `publish` to `async for`, when no log keeps them?"""
    async with _alone() as bus, bus.subscribe("bench/**", overflow="block") as subscriber:
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


async def replay(folder: Path, seconds: float) -> Figures:
    """How many stored events a second does a replay yield?"""
    async with _alone(folder / "batches.db") as bus:
        begun, read = time.perf_counter(), 0
        while time.perf_counter() < begun + seconds:
            async for _ in bus.replay("**"):
                read += 1
                if not read % BATCH_EVENTS and time.perf_counter() >= begun + seconds:
                    break
        return {"replayed_events_per_s": read / (time.perf_counter() - begun)}
