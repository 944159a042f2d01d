"""Without a log: how much of bare zenoh's rate does publish → `async for` reach, and how long does an event take?

The peer is zenoh's Python binding in a session without a network: `Publisher.put` to the default
callback, which runs on its own thread. zbus passes each event to a task of the same loop.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns

import zenoh
from _harness import PAYLOAD, Measurement, Row, Sizes, alternate, compare, run_one, zbus_versions, zenoh_versions

import zbus

KEY = "bench/orders/created"
WARM_UP = 1000
TARGET_RATE, TARGET_US = 0.5, 50.0
WAIT_S = 60.0


def rows(sizes: Sizes) -> list[Row]:
    """Measure the rate, and the latency of single events."""
    events, singles, rounds = sizes.of(200_000, 10_000), sizes.of(5000, 500), sizes.of(5, 1)
    versions = {"zbus": zbus_versions(), "peer": zenoh_versions()}
    return [
        compare(
            "no_log",
            "no log: publish → `async for` vs. bare zenoh `put` → default callback",
            unit="events/s",
            peer_name="zenoh",
            rounds=alternate(rounds, lambda: asyncio.run(zbus_rate(events)), lambda: zenoh_rate(events)),
            target=TARGET_RATE,
            versions=versions,
            events=events,
        ),
        compare(
            "no_log",
            "no log: from publish to receive, p50, one event at a time",
            unit="µs",
            peer_name="zenoh",
            rounds=alternate(rounds, lambda: asyncio.run(zbus_latency(singles)), lambda: zenoh_latency(singles)),
            target=TARGET_US,
            target_is="zbus at most",
            versions=versions,
            events=singles,
        ),
    ]


async def zbus_rate(events: int) -> Measurement:
    """Measure events per second until the last one is received; none may be dropped."""
    async with zbus.open() as bus:
        publisher = await bus.publisher(KEY)
        async with bus.subscribe(KEY) as subscription:
            await _stream(publisher, subscription, WARM_UP)
            begin = perf_counter_ns()
            await _stream(publisher, subscription, events)
            elapsed = perf_counter_ns() - begin
            if subscription.dropped:
                raise RuntimeError(f"{subscription.dropped} events were dropped")
    return Measurement(events / elapsed * 1e9)


async def _stream(publisher: zbus.EventPublisher, subscription: zbus.EventSubscriber, events: int) -> None:
    async def publish() -> None:
        for _ in range(events):
            await publisher.publish(PAYLOAD)

    publishing = asyncio.create_task(publish())
    left = events
    async for _ in subscription:
        left -= 1
        if not left:
            break
    await publishing


async def zbus_latency(events: int) -> Measurement:
    """Measure the median time from the call of `publish` to the body of `async for`, and all times."""
    durations: list[int] = []
    begin = 0
    received = asyncio.Event()

    async def read(subscription: zbus.EventSubscriber) -> None:
        async for _ in subscription:
            durations.append(perf_counter_ns() - begin)
            received.set()

    async with zbus.open() as bus:
        publisher = await bus.publisher(KEY)
        async with bus.subscribe(KEY) as subscription:
            reading = asyncio.create_task(read(subscription))
            await asyncio.sleep(0)
            for _ in range(WARM_UP + events):
                received.clear()
                begin = perf_counter_ns()
                await publisher.publish(PAYLOAD)
                await received.wait()
        await reading
    return _median(durations)


@contextmanager
def _bare(callback: Callable[[zenoh.Sample], None]) -> Iterator[zenoh.Publisher]:
    """Open a publisher and a subscriber in a session that opens no socket, like zbus."""
    config = zenoh.Config()
    settings = {
        "mode": "peer",
        "listen/endpoints": [],
        "connect/endpoints": [],
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "transport/shared_memory/enabled": False,
    }
    for name, value in settings.items():
        config.insert_json5(name, json.dumps(value))
    with zenoh.open(config) as session:
        subscriber = session.declare_subscriber(KEY, callback)
        yield session.declare_publisher(KEY)
        subscriber.undeclare()


def zenoh_rate(events: int) -> Measurement:
    """Measure puts per second until the last one has reached the callback."""
    done = threading.Event()
    seen, until = 0, 0

    def received(_: zenoh.Sample) -> None:
        nonlocal seen
        seen += 1
        if seen == until:
            done.set()

    with _bare(received) as publisher:
        for count in (WARM_UP, events):
            done.clear()
            until += count
            begin = perf_counter_ns()
            for _ in range(count):
                publisher.put(PAYLOAD)
            if not done.wait(WAIT_S):
                raise RuntimeError(f"zenoh delivered {seen} of {until}")
            elapsed = perf_counter_ns() - begin
    return Measurement(events / elapsed * 1e9)


def zenoh_latency(events: int) -> Measurement:
    """Measure the median time from the call of `put` to the callback, and all times."""
    durations: list[int] = []
    begin = 0
    done = threading.Event()

    def received(_: zenoh.Sample) -> None:
        durations.append(perf_counter_ns() - begin)
        done.set()

    with _bare(received) as publisher:
        for _ in range(WARM_UP + events):
            done.clear()
            begin = perf_counter_ns()
            publisher.put(PAYLOAD)
            if not done.wait(WAIT_S):
                raise RuntimeError("zenoh did not deliver")
    return _median(durations)


def _median(durations: list[int]) -> Measurement:
    kept = durations[WARM_UP:]
    return Measurement(statistics.median(kept) / 1000, kept)


if __name__ == "__main__":
    run_one(rows)
