"""How long does a publisher wait while Spark scans its log, compared with no Spark?

One publisher makes a hundred durable publishes per second, one at a time. Then the same while Spark repeatedly reads
the whole log with one task in its own process, as on a machine with a spare core.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from time import perf_counter_ns

from _harness import PAYLOAD, Measurement, Row, Sizes, alternate, compare, folder, percentile_us, run_one
from _spark import fill, spark_versions

import zbus

TARGET = 2.0
EVERY_S = 0.01
SCAN = """
import sys
import zbus_spark
spark = zbus_spark.session("local[1]")
def scan():
    spark.read.format("zbus").load(sys.argv[1]).write.format("noop").mode("overwrite").save()
scan()
print("scanning", flush=True)
while not sys.stdin.closed:
    scan()
"""


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row."""
    events, publishes, rounds = sizes.of(1_000_000, 20_000), sizes.of(1000, 100), sizes.of(3, 1)
    with folder() as where:
        log = where / "log.db"
        fill(log, events)
        versions = spark_versions()
        found = alternate(
            rounds,
            lambda: asyncio.run(while_scanned(log, publishes)),
            lambda: asyncio.run(publish(log, publishes)),
        )
    return [
        compare(
            "spark_beside",
            "publisher's p99 while Spark scans its log vs. alone",
            unit="µs",
            peer_name="alone",
            rounds=found,
            target=TARGET,
            target_is="ratio at most",
            versions={"zbus": versions, "peer": versions},
            events=events,
        )
    ]


async def publish(log: Path, publishes: int) -> Measurement:
    """Measure the p99 of single durable publishes at a steady rate."""
    durations: list[int] = []
    async with zbus.open(log) as bus:
        publisher = await bus.publisher("bench/orders/live")
        for _ in range(publishes):
            begin = perf_counter_ns()
            await publisher.publish(PAYLOAD)
            durations.append(perf_counter_ns() - begin)
            await asyncio.sleep(EVERY_S)
    return Measurement(percentile_us(durations, 99) or 0.0, durations)


async def while_scanned(log: Path, publishes: int) -> Measurement:
    """Measure the p99 while Spark reads."""
    scanning = subprocess.Popen(
        [sys.executable, "-c", SCAN, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert scanning.stdout is not None
        if await asyncio.to_thread(scanning.stdout.readline) != "scanning\n":
            raise RuntimeError("Spark did not scan")
        found = await publish(log, publishes)
        if scanning.poll() is not None:
            raise RuntimeError("Spark ended before the publisher did")
        return found
    finally:
        scanning.kill()
        scanning.communicate()


if __name__ == "__main__":
    run_one(rows)
