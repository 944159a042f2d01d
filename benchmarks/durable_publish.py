"""How many durable publishes per second, delivered to a subscriber, compared with JetStream through nats-py?

zbus: 256 publishers that each await every publish, on one bus whose log syncs each commit. The
peer: 1,000 publishes in flight, once syncing each message like zbus, and once with its default,
which acknowledges before it syncs. Both sides do the same work: every event is acknowledged and
delivered to one subscriber. The rate of the peer without a subscriber is stored in the same row.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import _nats
from _harness import PAYLOAD, Measurement, Row, Sizes, alternate, compare, folder, run_one, zbus_versions

import zbus

PUBLISHERS = 256
WARM_UP_EACH = 8
TARGETS = {"always": 20.0, "default": 4.0}
TITLES = {
    "always": "durable publishes, 256 awaiting, delivered vs. JetStream `sync_interval: always`",
    "default": "the same vs. JetStream's default, which acknowledges before fsync",
}


def rows(sizes: Sizes) -> list[Row]:
    """Measure both rows."""
    events = PUBLISHERS * sizes.of(200, 16)
    return [_row(sync, events, sizes.of(5, 1)) for sync in ("always", "default")]


def _row(sync: str, events: int, rounds: int) -> Row:
    also: dict[str, list[float]] = {"peer_publish_only": []}
    with folder() as where, _nats.nats_server(where / "nats", sync_always=sync == "always") as url:
        # The peer that syncs each message is slow: fewer events give the same rate in less time.
        theirs = events // 4 if sync == "always" else events
        found = alternate(rounds, _ours(where, events), _theirs(url, theirs, also))
    alone_ = [ours.value / peer for (ours, _), peer in zip(found, also["peer_publish_only"], strict=True)]
    return compare(
        "durable_publish",
        TITLES[sync],
        unit="events/s",
        peer_name=f"JetStream, sync {sync}",
        rounds=found,
        target=TARGETS[sync],
        versions={"zbus": zbus_versions(), "peer": _nats.peer_versions()},
        events=events,
        ratio_when_the_peer_only_publishes=statistics.median(alone_),
        **also,
    )


def _ours(where: Path, events: int) -> Callable[[], Measurement]:
    return lambda: asyncio.run(measure_zbus(where / f"log-{time.time_ns()}.db", events))


def _theirs(url: str, events: int, also: dict[str, list[float]]) -> Callable[[], Measurement]:
    def measure() -> Measurement:
        also["peer_publish_only"].append(asyncio.run(measure_jetstream(url, events, delivered=False)).value)
        return asyncio.run(measure_jetstream(url, events, delivered=True))

    return measure


async def measure_zbus(log: Path, events: int) -> Measurement:
    """Measure events per second until the last one is acknowledged and delivered, and each publish."""
    async with zbus.open(log) as bus:
        publishers = [await bus.publisher(f"bench/orders/p{number}") for number in range(PUBLISHERS)]
        async with bus.subscribe("bench/**", overflow="spill") as subscription:
            await turn(publishers, subscription, WARM_UP_EACH)
            begin = perf_counter_ns()
            durations = await turn(publishers, subscription, events // PUBLISHERS)
            elapsed = perf_counter_ns() - begin
    return Measurement(events / elapsed * 1e9, durations)


async def turn(publishers: list[zbus.EventPublisher], subscription: zbus.EventSubscriber, each: int) -> list[int]:
    """Publish `each` events per publisher and read all. Returns the duration of each publish."""
    durations: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_receive(subscription, each * len(publishers)))
        for publisher in publishers:
            tasks.create_task(_publish(publisher, each, durations))
    return durations


async def _publish(publisher: zbus.EventPublisher, events: int, durations: list[int]) -> None:
    for _ in range(events):
        begin = perf_counter_ns()
        await publisher.publish(PAYLOAD)
        durations.append(perf_counter_ns() - begin)


async def _receive(subscription: zbus.EventSubscriber, events: int) -> None:
    async for _ in subscription:
        events -= 1
        if not events:
            return


async def measure_jetstream(url: str, events: int, *, delivered: bool) -> Measurement:
    """Measure events per second until the last one is acknowledged and, if requested, delivered."""
    warm_up = PUBLISHERS * WARM_UP_EACH
    async with _nats.fresh_stream(url) as stream:
        seen = await _nats.delivery(stream, warm_up + events) if delivered else None
        await _nats.publish(stream, warm_up)
        begin = perf_counter_ns()
        durations = await _nats.publish(stream, events)
        if seen is not None:
            await asyncio.wait_for(seen.wait(), _nats.WAIT_S)
        elapsed = perf_counter_ns() - begin
        await _nats.expect_stored(stream, warm_up + events)
    return Measurement(events / elapsed * 1e9, durations)


if __name__ == "__main__":
    run_one(rows)
