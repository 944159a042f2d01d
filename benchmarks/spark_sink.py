"""How fast does the sink publish rows of a DataFrame, compared with `publish_many` of the same payloads?

Both end when every event is on disk. The rows are in Spark's memory before the clock starts.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from _harness import PAYLOAD, Measurement, Row, Sizes, alternate, compare, folder, run_one
from _spark import spark, spark_versions
from pyspark.sql import functions as f

import zbus

TARGET = 0.4


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row."""
    events, rounds = sizes.of(1_000_000, 20_000), sizes.of(3, 1)
    frame = spark().range(events, numPartitions=2).select(f.lit(PAYLOAD).alias("payload")).cache()
    if frame.count() != events:
        raise RuntimeError("the rows were not made")
    with folder() as where:
        paths = (where / f"{number}.db" for number in itertools.count())
        save(frame.limit(1000), next(paths), 1000)  # warm-up: the first job of a session has additional costs
        found = alternate(
            rounds,
            lambda: save(frame, next(paths), events),
            lambda: asyncio.run(publish_many(next(paths), events)),
        )
    frame.unpersist()
    versions = spark_versions()
    return [
        compare(
            "spark_sink",
            "rows to durable events by the sink vs. `publish_many`",
            unit="events/s",
            peer_name="publish_many",
            rounds=found,
            target=TARGET,
            versions={"zbus": versions, "peer": versions},
            events=events,
        )
    ]


def save(frame: Any, log: Path, events: int) -> Measurement:
    """Measure events per second through `df.write.format("zbus")`."""
    begin = perf_counter_ns()
    frame.write.format("zbus").option("key", "bench/orders/created").mode("append").save(str(log))
    took = perf_counter_ns() - begin
    if (stored := asyncio.run(_head(log))) != events:
        raise RuntimeError(f"{stored} of {events} events were stored")
    return Measurement(events / took * 1e9)


async def publish_many(log: Path, events: int) -> Measurement:
    """Measure events per second through a publisher."""
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("bench/orders/created")
        begin = perf_counter_ns()
        await publisher.publish_many(itertools.repeat(PAYLOAD, events))
        return Measurement(events / (perf_counter_ns() - begin) * 1e9)


async def _head(log: Path) -> int:
    async with zbus.open(log, read_only=True) as bus:
        return await bus.head()


if __name__ == "__main__":
    run_one(rows)
