"""`benchmarks/run.py` measures every row of the table, each against a real peer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN_S = 600.0

# Whichever test comes first waits for the run, which takes minutes.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(RUN_S + 30)]

# How many rows each benchmark has, and the targets that the project set itself.
TARGETS = {
    "durable_publish": [20.0, 4.0],
    "publish_many": [0.5],
    "single_publish": [2.0],
    "no_log": [0.5, 50.0],
    "replay": [0.4, 10.0],
    "verify": [0.6],
    "many_keys": [0.5, 200.0, 2000.0],
    "backup": [0.5, 2.0],
    "subscriptions": [1.5, 1.5, 1.5],
    "cached_read": [0.5, 0.5],
    "footprint": [10.0, 150.0, 25.0],
    "observed": [0.95],
    "schema_check": [1.3, 1.3],
    "on_nats": [0.6],
    "on_zmq": [0.6],
    "on_zenoh": [0.5],
    "raw_bridge": [0.5],
    "zmq_publishers": [4.0, 4.0],
    "found_after_start": [1000.0, 1000.0, 1000.0, 1000.0],
    "sse_clients": [200.0, 50.0],
    "http_publish": [0.5],
    "console_frames": [100.0],
}
SPARK_TARGETS = {
    "spark_scan": [1.5, 0.35, 0.25],
    "spark_rollup": [2.0],
    "spark_sink": [0.4],
    "spark_offload": [0.5],
    "spark_beside": [2.0],
}


Run = tuple[str, list[dict[str, Any]], dict[str, list[float]]]


@pytest.fixture(scope="module", params=[TARGETS, SPARK_TARGETS], ids=["bus", "spark"])
def run(request: pytest.FixtureRequest) -> Run:
    """One quick run: what it printed, what it stored, and the targets that it should have."""
    before = set(BENCHMARKS.glob("results/*.json"))
    only = [f"--only={name}" for name in request.param]
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--quick", "--markdown", *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    (stored,) = set(BENCHMARKS.glob("results/*.json")) - before
    found = [json.loads(line) for line in stored.read_text().splitlines()]
    stored.unlink()
    return done.stdout, found, request.param


def test_every_row_has_a_ratio_and_its_target(run: Run) -> None:
    _, rows, expected = run
    targets: dict[str, list[float]] = {}
    for row in rows:
        targets.setdefault(row["benchmark"], []).append(row["target"])
        assert row["ratio"] > 0, row
        assert row["zbus"] > 0, row
        assert row["peer"] > 0, row
        assert isinstance(row["met"], bool)
    assert targets == expected


def test_every_row_names_the_versions_of_both_sides_and_the_machine(run: Run) -> None:
    _, rows, _ = run
    for row in rows:
        assert row["versions"]["zbus"]["zbus"]
        assert row["versions"]["peer"]
        assert {"cpu", "cores", "kernel", "file_system", "fsync_us_p50"} <= row["machine"].keys()
        assert row["rounds"]
        assert all({"zbus", "peer", "ratio"} <= each.keys() for each in row["rounds"])


def test_a_latency_comes_with_its_percentiles(run: Run) -> None:
    _, rows, _ = run
    for row in rows:
        if row["unit"] == "µs":
            for side in ("zbus", "peer"):
                assert row["p50_us"][side] <= row["p99_us"][side]


def test_the_table_for_people_has_a_line_for_every_row(run: Run) -> None:
    printed, rows, expected = run
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == len(rows) + 2
    assert sum(Counter(row["benchmark"] for row in rows).values()) == sum(map(len, expected.values()))
    for row in rows:
        assert any(row["title"] in line for line in lines)
