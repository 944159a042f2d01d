"""How much processor time does a publish take with 10,000 other subscriptions, compared with 10?

The others do not match the published key and differ from it in every way: literal keys, `*`, `**`
and `$*`, in the first, the middle and the last segment. One subscription matches and reads.
`warm`: keys that were published before, the usual case; `cold`: a key without any earlier publish,
so that its subscriptions have to be looked up; `log`: durable publishes.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Literal

from _harness import PAYLOAD, Measurement, Row, Sizes, alternate, compare, folder, run_one, zbus_versions

import zbus

Way = Literal["warm", "cold", "log"]

FEW, MANY = 10, 10_000
WARM_KEYS = 64
WARM_UP = 500
TARGET = 1.5
TITLES: dict[Way, str] = {
    "warm": "cost (processor time) of a publish with 10,000 other subscriptions vs. 10, no log",
    "cold": "the same, to a key that was never published before",
    "log": "the same, with a log: 64 awaiting publishers",
}
# None of them matches a key of bench/orders/…
OTHERS = (
    "bench/orders/other-{0}",
    "other/{0}/created",
    "other/{0}/*",
    "*/other-{0}/created",
    "**/other-{0}",
    "bench/**/other-{0}/*",
    "bench/other$*-{0}/created",
    "other-{0}/**",
)


def rows(sizes: Sizes) -> list[Row]:
    """Measure one row for each case."""
    events = {"warm": sizes.of(20_000, 2000), "cold": sizes.of(4000, 1000), "log": 64 * sizes.of(150, 15)}
    with folder() as where:
        return [_row(way, where, events[way], sizes.of(5, 1)) for way in TITLES]


def _row(way: Way, where: Path, events: int, rounds: int) -> Row:
    versions = zbus_versions()
    return compare(
        "subscriptions",
        TITLES[way],
        unit="µs",
        peer_name="10 others",
        rounds=alternate(
            rounds,
            lambda: asyncio.run(measure(way, where, MANY, events)),
            lambda: asyncio.run(measure(way, where, FEW, events)),
        ),
        target=TARGET,
        target_is="ratio at most",
        versions={"zbus": versions, "peer": versions},
        events=events,
    )


async def measure(way: Way, where: Path, others: int, events: int) -> Measurement:
    """Measure the processor time of a publish in microseconds, including reading, and each duration."""
    log = where / f"{time.time_ns()}.db" if way == "log" else None
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(zbus.open(log))
        kept = [bus.subscribe(OTHERS[number % len(OTHERS)].format(number)) for number in range(others)]
        wanted = await stack.enter_async_context(bus.subscribe("bench/orders/*"))
        keys = WARM_KEYS if way != "cold" else WARM_UP + events
        publishers = [await bus.publisher(f"bench/orders/k{number}") for number in range(keys)]
        await _turn(way, publishers[:WARM_UP], wanted, WARM_UP)
        used = publishers[WARM_UP:] if way == "cold" else publishers
        begin = process_time_ns()
        durations = await _turn(way, used, wanted, events)
        spent = process_time_ns() - begin
        if wanted.dropped or any(each.queued for each in kept):
            raise RuntimeError("an event was dropped, or went to a subscription that does not want it")
    return Measurement(spent / events / 1000, durations)


async def _turn(
    way: Way, publishers: list[zbus.EventPublisher], wanted: zbus.EventSubscriber, events: int
) -> list[int]:
    """Publish from one task, or with a log from one task per publisher, and read all events."""
    tasks = len(publishers) if way == "log" else 1
    events -= events % tasks
    durations: list[int] = []

    async def publish(task: int) -> None:
        for number in range(task, events, tasks):
            publisher = publishers[number % len(publishers)]
            begin = perf_counter_ns()
            await publisher.publish(PAYLOAD)
            durations.append(perf_counter_ns() - begin)

    async with asyncio.TaskGroup() as group:
        for task in range(tasks):
            group.create_task(publish(task))
        left = events
        async for _ in wanted:
            left -= 1
            if not left:
                break
    return durations


if __name__ == "__main__":
    run_one(rows)
