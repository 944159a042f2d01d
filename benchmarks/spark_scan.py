"""How fast does Spark read a log, compared with plain sqlite3 and with Parquet, and how fast one key of a hundred?

All columns go to Spark's `noop` sink. The peers: a plain iteration over the same rows in Python, with the key's name
joined to each; Spark's own reader of the same rows in Parquet files; and zbus's own full scan for the key expression.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import apsw
from _harness import Measurement, Row, Sizes, alternate, compare, folder, run_one, sqlite_versions
from _spark import KEYS, fill, scanned, spark, spark_versions

TARGET_SQLITE, TARGET_PARQUET, TARGET_KEY = 1.5, 0.35, 0.25
WARM = 3
ONE_KEY = "bench/*/p7"


def rows(sizes: Sizes) -> list[Row]:
    """Measure the three rows over one log."""
    events, rounds = sizes.of(1_000_000, 20_000), sizes.of(5, 1)
    with folder() as where:
        log, parquet = where / "log.db", str(where / "parquet")
        fill(log, events)
        load(log, events).write.parquet(parquet)
        for _ in range(WARM):  # warm-up: Java compiles the code of both sides
            scanned(load(log, events))
            scanned(spark().read.parquet(parquet))
        versions = spark_versions()
        whole, full_s = _whole(log, events), []

        def full_scan() -> Measurement:
            full_s.append(events / whole().value)
            return Measurement(full_s[-1])

        return [
            compare(
                "spark_scan",
                "scan of a log into Spark, 2 partitions, vs. a plain sqlite3 iteration",
                unit="events/s",
                peer_name="apsw",
                rounds=alternate(rounds, whole, lambda: iterate(log, events)),
                target=TARGET_SQLITE,
                versions={"zbus": versions, "peer": sqlite_versions()},
                events=events,
            ),
            compare(
                "spark_scan",
                "the same vs. Spark reading those rows from Parquet",
                unit="events/s",
                peer_name="Spark, Parquet",
                rounds=alternate(rounds, whole, lambda: read_parquet(parquet, events)),
                target=TARGET_PARQUET,
                versions={"zbus": versions, "peer": {"pyspark": versions["pyspark"]}},
                events=events,
            ),
            compare(
                "spark_scan",
                "time for a key expression that matches 1 % vs. the full scan",
                unit="s",
                peer_name="full scan",
                rounds=alternate(rounds, lambda: one_key(log, events), full_scan),
                target=TARGET_KEY,
                target_is="ratio at most",
                versions={"zbus": versions, "peer": versions},
                events=events,
            ),
        ]


def load(log: Path, events: int, **options: str) -> Any:
    """Load a fresh snapshot of the log in two partitions."""
    reader = spark().read.format("zbus").option("rowsPerPartition", -(-events // 2))
    return reader.options(**options).load(str(log))


def _whole(log: Path, events: int) -> Callable[[], Measurement]:
    return lambda: Measurement(events / scanned(load(log, events)) * 1e9)


def one_key(log: Path, events: int) -> Measurement:
    """Measure the seconds for the events of one key of a hundred."""
    found = load(log, events, key=ONE_KEY)
    took = scanned(found)
    if abs(found.count() - events // KEYS) > 1000:
        raise RuntimeError("the expression found the wrong number of events")
    return Measurement(took / 1e9)


def read_parquet(path: str, events: int) -> Measurement:
    """Measure rows per second through Spark's own reader."""
    return Measurement(events / scanned(spark().read.parquet(path)) * 1e9)


def iterate(log: Path, events: int) -> Measurement:
    """Measure rows per second through the bare driver, each with the name of its key."""
    connection = apsw.Connection(str(log), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        begin = perf_counter_ns()
        seen = 0
        for _ in connection.execute("SELECT events.*, keys.key FROM events JOIN keys ON keys.id = events.key"):
            seen += 1
        elapsed = perf_counter_ns() - begin
    finally:
        connection.close()
    if seen != events:
        raise RuntimeError(f"the iteration read {seen} of {events} events")
    return Measurement(events / elapsed * 1e9)


if __name__ == "__main__":
    run_one(rows)
