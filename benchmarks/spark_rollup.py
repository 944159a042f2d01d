"""How long does the rollup of a log take, compared with the same query in plain SQL on its file?

Both compute events, bytes and rate per key and minute, and fetch the result. The SQL computes no percentiles (SQLite
cannot, and no event of this log has a latency); the rollup still looks for them. Starting the session is not measured.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter_ns

import apsw
from _harness import Measurement, Row, Sizes, alternate, compare, folder, run_one, sqlite_versions
from _spark import fill, spark, spark_versions

import zbus_spark
from zbus_spark.jobs.rollup import columns

TARGET = 2.0
SQL = """
SELECT keys.key, published_at / 60000000000 AS minute, count(*), sum(length(payload)), count(*) / 60.0
FROM events JOIN keys ON keys.id = events.key GROUP BY keys.key, minute
"""


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row."""
    events, rounds = sizes.of(1_000_000, 20_000), sizes.of(5, 1)
    with folder() as where:
        log = where / "log.db"
        fill(log, events)
        roll_up(log, events)  # warm-up: the first job of a session has additional costs
        found = alternate(rounds, lambda: roll_up(log, events), lambda: in_sql(log, events))
    return [
        compare(
            "spark_rollup",
            "time of a rollup per key and minute vs. the same in plain SQL on SQLite",
            unit="s",
            peer_name="apsw",
            rounds=found,
            target=TARGET,
            target_is="ratio at most",
            versions={"zbus": spark_versions(), "peer": sqlite_versions()},
            events=events,
        )
    ]


def roll_up(log: Path, events: int) -> Measurement:
    """Measure the seconds of the job of `zbus pipeline rollup`."""
    begin = perf_counter_ns()
    found = zbus_spark.rollup(zbus_spark.read(spark(), str(log), columns=columns())).collect()
    took = perf_counter_ns() - begin
    _expect(sum(row.events for row in found), events)
    return Measurement(took / 1e9)


def in_sql(log: Path, events: int) -> Measurement:
    """Measure the seconds of the query."""
    connection = apsw.Connection(str(log), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        begin = perf_counter_ns()
        found = connection.execute(SQL).fetchall()
        took = perf_counter_ns() - begin
    finally:
        connection.close()
    _expect(sum(row[2] for row in found), events)
    return Measurement(took / 1e9)


def _expect(seen: int, events: int) -> None:
    if seen != events:
        raise RuntimeError(f"{seen} of {events} events were counted")


if __name__ == "__main__":
    run_one(rows)
