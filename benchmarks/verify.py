"""How fast does `zbus log verify` check a log, compared with a replay of the same events?

Verifying reads every table, index and checksum of the file; a replay reads the events and checks theirs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import perf_counter_ns

from _harness import Measurement, Row, Sizes, alternate, compare, folder, run_one, zbus_versions
from replay import fill, measure_zbus

from zbus_log.read.verify import verify

TARGET = 0.6


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row."""
    events = sizes.of(500_000, 20_000)
    with folder() as where:
        log = where / "log.db"
        asyncio.run(fill(log, events))
        rounds = alternate(sizes.of(5, 1), lambda: check(log, events), lambda: asyncio.run(measure_zbus(log, events)))
    versions = {"zbus": zbus_versions(), "peer": zbus_versions()}
    return [
        compare(
            "verify",
            "`zbus log verify` vs. a replay of the same log",
            unit="events/s",
            peer_name="replay",
            rounds=rounds,
            target=TARGET,
            versions=versions,
            events=events,
        )
    ]


def check(log: Path, events: int) -> Measurement:
    """Measure events per second of a verification, including opening the file."""
    begin = perf_counter_ns()
    report = verify(str(log))
    elapsed = perf_counter_ns() - begin
    if report.problems or report.head != events:
        raise RuntimeError(f"verified {report.head} of {events} events: {report.problems}")
    return Measurement(events / elapsed * 1e9)


if __name__ == "__main__":
    run_one(rows)
