"""SIGKILL of Spark at every point of a batch: each row is in the log once, and nothing stays staged.

The points: while rows are staged; with the intent written; in the middle of the put; after it; with the batch marked
as done. Also with the process that commits left alive, as a kill of the JVM alone does.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sink_child import HELD_CHUNKS, LINES, POINTS, ForgetfulSource, go_on, kill_at, left, query, stored, surplus
from spark_support import spark

from zbus_log import verify
from zbus_spark import spark_errors

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def check(folder: Path) -> None:
    log = folder / "app.db"
    events = stored(log)
    assert surplus(folder) == {}
    assert left(log) == []
    assert [event.sequence for event in events] == list(range(len(events)))
    assert len({event.publisher_id for event in events}) == 1
    assert verify(str(log)).problems == []


def test_a_query_killed_at_any_point_goes_on_and_every_row_is_in_the_log_once(tmp_path: Path) -> None:
    kill_at(tmp_path, POINTS)
    held = {point: len(stored(tmp_path / point / "app.db")) for point in POINTS}
    assert held["staging"] == held["intent"] == LINES
    assert LINES + (HELD_CHUNKS - 1) * 1000 <= held["put"] < 2 * LINES
    assert held["mark"] == held["done"] == 2 * LINES
    twice = {"put": held["put"] - LINES, "mark": LINES, "done": LINES}  # rows that a source without memory stores twice
    for point in twice:
        shutil.copytree(tmp_path / point, tmp_path / f"{point}-control", ignore=shutil.ignore_patterns("wake"))

    for point in POINTS:
        go_on(spark(), tmp_path / point)
        check(tmp_path / point)

    spark().dataSource.register(ForgetfulSource)
    for point, lines in twice.items():
        go_on(spark(), tmp_path / f"{point}-control", "zbus-forgetful")
        assert sum(surplus(tmp_path / f"{point}-control").values()) == lines, point


def test_a_commit_that_outlives_its_jvm_and_the_one_that_takes_over_publish_every_row_once(tmp_path: Path) -> None:
    points = ("intent", "put", "mark")
    kill_at(tmp_path, points, workers_too=False)
    going_on = [query(spark(), tmp_path / point) for point in points]
    for point in points:
        (tmp_path / point / "go-on").touch()
    for each in going_on:  # the second to commit waits for the first
        with spark_errors():
            each.awaitTermination()

    for point in points:
        check(tmp_path / point)
