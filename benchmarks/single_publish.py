"""How long does one publisher wait for each durable publish, compared with a bare single-row commit with fsync?

zbus goes from the event loop to the writer thread and back; the peer is a driver that inserts a
row built in advance, on the calling thread. Both sync every commit.
"""

from __future__ import annotations

import asyncio
import statistics
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

WARM_UP = 50
TARGET = 2.0


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row. Its ratio is that of the medians."""
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
            "one publisher awaiting each, p50, vs. a bare single-row commit with fsync",
            unit="µs",
            peer_name="apsw",
            rounds=found,
            target=TARGET,
            target_is="ratio at most",
            versions={"zbus": zbus_versions(), "peer": sqlite_versions()},
            events=events,
        )
    ]


def _new(where: Path) -> Path:
    return where / f"{time.time_ns()}.db"


async def measure_zbus(log: Path, events: int) -> Measurement:
    """Measure the median duration of a publish in microseconds, and all durations."""
    durations = []
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("bench/orders/created")
        for _ in range(WARM_UP + events):
            begin = perf_counter_ns()
            await publisher.publish(PAYLOAD)
            durations.append(perf_counter_ns() - begin)
    return _median(durations)


def measure_bare(path: Path, events: int) -> Measurement:
    """Measure the median duration of an INSERT with its own commit, and all durations."""
    made = _sqlite.bare_rows(1, WARM_UP + events)
    durations = []
    with _sqlite.bare_file(path) as connection:
        for row in made:
            begin = perf_counter_ns()
            connection.execute(_sqlite.INSERT, row)
            durations.append(perf_counter_ns() - begin)
    return _median(durations)


def _median(durations: list[int]) -> Measurement:
    kept = durations[WARM_UP:]
    return Measurement(statistics.median(kept) / 1000, kept)


if __name__ == "__main__":
    run_one(rows)
