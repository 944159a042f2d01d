"""Spark for the benchmarks: one session, a large log, and the duration of a full scan."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from _harness import zbus_versions

import zbus
import zbus_spark

KEYS = 100
CHUNK = 1000


@cache
def spark() -> Any:
    """Return a warmed-up session with two cores."""
    made = zbus_spark.session("local[2]", spark__driver__memory="3g")
    made.range(1000).write.format("noop").mode("overwrite").save()
    return made


def fill(log: Path, events: int) -> None:
    """Create a log of `events` events of ~100 bytes, spread evenly over 100 keys."""

    async def publish() -> None:
        async with zbus.open(log) as bus:
            publishers = [await bus.publisher(f"bench/orders/p{number}") for number in range(KEYS)]
            payload = b'{"order": 123456, "amount": 99.95, "customer": "c-00001234", "note": "' + b"x" * 26 + b'"}'
            done = number = 0
            while done < events:
                count = min(CHUNK, events - done)
                await publishers[number % KEYS].publish_many([payload] * count)
                done, number = done + count, number + 1

    asyncio.run(publish())


def scanned(frame: Any) -> int:
    """Return the time in ns that Spark takes to read every column of every row."""
    begin = perf_counter_ns()
    frame.write.format("noop").mode("overwrite").save()
    return perf_counter_ns() - begin


def spark_versions() -> dict[str, str]:
    """Return the versions of zbus and Spark."""
    return zbus_versions() | {name: version(name) for name in ("pyspark", "pyarrow", "adbc-driver-sqlite")}
