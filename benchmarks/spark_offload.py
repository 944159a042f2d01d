"""How fast is a replay from the cold tier, compared with one from the log, and how fast is the offload?

The same events are replayed through `bus.replay` before they were offloaded and after they were trimmed from the log.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from time import perf_counter_ns

from _harness import Measurement, Row, Sizes, alternate, compare, folder, run_one
from _spark import fill, spark, spark_versions

import zbus
import zbus_spark

TARGET = 0.5


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row, and the rate of the offload as an extra value."""
    events, rounds = sizes.of(1_000_000, 20_000), sizes.of(5, 1)
    with folder() as where:
        hot, cold = where / "hot.db", where / "cold.db"
        fill(cold, events)
        for file in where.glob("cold.db*"):
            shutil.copy(file, where / file.name.replace("cold", "hot"))
        begin = perf_counter_ns()
        moved = zbus_spark.offload(spark(), str(cold))
        offload_events_per_s = moved.events / (perf_counter_ns() - begin) * 1e9
        trimmed = zbus_spark.trim(str(cold))
        if trimmed.low_water < events * 3 // 4:
            raise RuntimeError(f"only {trimmed.low_water} of {events} events are cold")
        found = alternate(rounds, lambda: replay(cold, events), lambda: replay(hot, events))
    versions = spark_versions()
    return [
        compare(
            "spark_offload",
            f"replay from the cold tier vs. the log's file (offload: {offload_events_per_s:,.0f} events/s)",
            unit="events/s",
            peer_name="hot replay",
            rounds=found,
            target=TARGET,
            versions={"zbus": versions, "peer": versions},
            events=events,
            cold_events=trimmed.low_water,
            offload_events_per_s=offload_events_per_s,
        )
    ]


def replay(log: Path, events: int) -> Measurement:
    """Measure events per second through `bus.replay`, from the beginning to the end."""
    return asyncio.run(_replay(log, events))


async def _replay(log: Path, events: int) -> Measurement:
    async with zbus.open(log, read_only=True) as bus:
        begin = perf_counter_ns()
        seen = 0
        async for _ in bus.replay():
            seen += 1
        took = perf_counter_ns() - begin
    if seen != events:
        raise RuntimeError(f"{seen} of {events} events were replayed")
    return Measurement(events / took * 1e9)


if __name__ == "__main__":
    run_one(rows)
