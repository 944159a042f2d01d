"""How fast is `publish_many` in batches of 1,000, compared with a bare `executemany` into the same schema?

zbus: one publisher that awaits `publish_many` of 1,000 events in a loop. The peer: transactions
of 1,000 rows in a loop, by a driver that does nothing else, with rows built in advance. Both sync
every commit.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from time import perf_counter_ns

import _sqlite
from _harness import (
    PAYLOAD,
    Measurement,
    Row,
    Sizes,
    alternate,
    compare,
    folder,
    run_one,
    sqlite_versions,
    zbus_versions,
)

import zbus

BATCH = 1000
WARM_UP_BATCHES = 5
TARGET = 0.5


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row."""
    batches = sizes.of(100, 10)
    with folder() as where:
        found = alternate(
            sizes.of(5, 1),
            lambda: asyncio.run(measure_zbus(_new(where), batches)),
            lambda: measure_bare(_new(where), batches),
        )
        at_once = asyncio.run(measure_at_once(_new(where), batches))
    return [
        compare(
            "publish_many",
            "`publish_many` in batches of 1,000 vs. a bare `executemany` into the same schema",
            unit="events/s",
            peer_name="apsw",
            rounds=found,
            target=TARGET,
            versions={"zbus": zbus_versions(), "peer": sqlite_versions()},
            durations="of one batch of 1,000",
            events=batches * BATCH,
            zbus_all_in_one_call=at_once,
        )
    ]


def _new(where: Path) -> Path:
    return where / f"{time.time_ns()}.db"


async def measure_zbus(log: Path, batches: int) -> Measurement:
    """Measure events per second, with each call awaited, and the duration of each call."""
    payloads = [PAYLOAD] * BATCH
    durations = []
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("bench/orders/created")
        for number in range(WARM_UP_BATCHES + batches):
            begin = perf_counter_ns()
            await publisher.publish_many(payloads)
            if number >= WARM_UP_BATCHES:
                durations.append(perf_counter_ns() - begin)
    return Measurement(len(durations) * BATCH / sum(durations) * 1e9, durations)


async def measure_at_once(log: Path, batches: int) -> float:
    """Measure events per second if all events are published in one call."""
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("bench/orders/created")
        await publisher.publish_many([PAYLOAD] * BATCH * WARM_UP_BATCHES)
        begin = perf_counter_ns()
        await publisher.publish_many([PAYLOAD] * BATCH * batches)
        return batches * BATCH / (perf_counter_ns() - begin) * 1e9


def measure_bare(path: Path, batches: int) -> Measurement:
    """Measure rows per second of the bare driver, and the duration of each transaction."""
    made = [_sqlite.bare_rows(1 + number * BATCH, BATCH) for number in range(WARM_UP_BATCHES + batches)]
    durations = []
    with _sqlite.bare_file(path) as connection:
        for number, batch in enumerate(made):
            begin = perf_counter_ns()
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_sqlite.INSERT, batch)
            connection.execute("COMMIT")
            if number >= WARM_UP_BATCHES:
                durations.append(perf_counter_ns() - begin)
    return Measurement(len(durations) * BATCH / sum(durations) * 1e9, durations)


if __name__ == "__main__":
    run_one(rows)
