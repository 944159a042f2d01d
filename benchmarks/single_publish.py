"""How long does one publisher wait for each durable publish, beside a bare single-row commit with fsync?

Ours goes from the event loop to the writer's thread and back; the peer is a driver that inserts a
row made in advance, on the thread that asks. Both sync every commit.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from time import perf_counter_ns

import _sqlite
import pysqlite3
from _harness import PAYLOAD, Figure, Row, Sizes, alone, alternate, compare, folder, sqlite_versions, zbus_versions

import zbus

WARM_UP = 50
TARGET = 2.0


def rows(sizes: Sizes) -> list[Row]:
    """The one question; the ratio is that of the medians."""
    events = sizes.of(2000, 200)
    with folder() as where:
        found = alternate(
            sizes.of(5, 1),
            lambda: asyncio.run(measure_zbus(_new(where), events)),
            lambda: measure_bare(_new(where), events),
        )
    return [
        compare(
            "single_publish",
            "one publisher awaiting each, p50, beside a bare single-row commit with fsync",
            unit="µs",
            peer_name="pysqlite3",
            rounds=found,
            target=TARGET,
            target_is="ratio at most",
            versions={"zbus": zbus_versions(), "peer": sqlite_versions(pysqlite3)},
            events=events,
        )
    ]


def _new(where: Path) -> Path:
    return where / f"{time.time_ns()}.db"


async def measure_zbus(log: Path, events: int) -> Figure:
    """The median duration of a publish in microseconds, and all of them."""
    durations = []
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("bench/orders/created")
        for _ in range(WARM_UP + events):
            begin = perf_counter_ns()
            await publisher.publish(PAYLOAD)
            durations.append(perf_counter_ns() - begin)
    return _median(durations)


def measure_bare(path: Path, events: int) -> Figure:
    """The median duration of an INSERT that commits by itself, and all of them."""
    made = _sqlite.bare_rows(1, WARM_UP + events)
    durations = []
    with _sqlite.bare_file(path) as connection:
        for row in made:
            begin = perf_counter_ns()
            connection.execute(_sqlite.INSERT, row)
            durations.append(perf_counter_ns() - begin)
    return _median(durations)


def _median(durations: list[int]) -> Figure:
    kept = durations[WARM_UP:]
    return Figure(statistics.median(kept) / 1000, kept)


if __name__ == "__main__":
    alone(rows)
