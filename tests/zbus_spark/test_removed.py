"""Spark reads and offloads a log from whose middle events were removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_support import raw
from pipeline_support import Stored, pipeline, store
from pyspark.errors import PySparkException
from spark_support import spark
from tier_support import hot, make_log, rows

from zbus_log import Rules, prune, purge, verify
from zbus_spark.jobs.offload import offload
from zbus_spark.jobs.trim import trim
from zbus_spark.reading import read

EVENTS = 9_000
NEVER_STORED = 51  # between two events that stay


def of_two_keys(path: Path, lacks: int | None = None) -> Path:
    """A log of one publisher, in which runs of ten events on one key and on another take turns."""
    events = [Stored(7, number, "shop/orders" if number // 10 % 2 else "tele/cpu") for number in range(100)]
    return store(path, [event for event in events if event.sequence != lacks])


def forget_identities(log: Path) -> None:
    """As the log does itself after `dedup_s`."""
    connection = raw(log)
    connection.execute("DELETE FROM removed_identities")
    connection.close()


def findings(command: str, *arguments: object) -> tuple[int, list[tuple[str, int]], str]:
    """The exit code of a check, the findings with the first sequence of each, and what it wrote for people."""
    done = pipeline(command, *arguments, "--check", "--json")
    first = "sequence" if command == "coverage" else "first_sequence"
    return done.code, [(line["finding"], line[first]) for line in done.lines], done.err


def test_removed_events_are_neither_read_nor_missing_and_an_offload_passes_over_them(tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", EVENTS)
    before = hot(log)
    key = next(index for index, value in enumerate(before[0]) if value == "shop/orders/created")
    left = [row for row in before if row[key] != "audit/log"]

    assert purge(log, ["audit/**"]).removed == len(before) - len(left)
    assert hot(log) == left

    offload(spark(), log)
    assert rows(read(spark(), log)) == left
    trim(log)
    assert rows(read(spark(), log)) == left
    assert verify(str(log)).problems == []
    assert purge(log, ["shop/**"]).offloaded_until > 0


def test_an_event_that_is_lost_beside_removed_ones_is_an_error(tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", 100)
    purge(log, ["audit/**"])
    connection = raw(log)
    connection.execute("DROP TRIGGER events_are_not_deleted")
    connection.execute("DELETE FROM events WHERE offset = 5")
    connection.close()

    with pytest.raises(PySparkException, match="missing"):
        hot(log)


def test_gaps_says_that_removed_events_are_removed_and_not_missing(tmp_path: Path) -> None:
    whole, log = of_two_keys(tmp_path / "whole.db"), of_two_keys(tmp_path / "app.db", lacks=NEVER_STORED)
    for each in (whole, log):
        purge(each, ["tele/**"])

    removed = [("removed", first) for first in range(0, 100, 20)]
    code, found, said = findings("gaps", whole)
    assert (code, found) == (0, removed)
    assert "missing: 0" in said
    assert "removed from the middle of this log: 50" in said
    assert findings("gaps", log)[:2] == (1, sorted([*removed, ("between", NEVER_STORED)], key=lambda each: each[1]))


def test_a_gap_beside_removed_events_may_be_removed_after_their_identities_are_forgotten(tmp_path: Path) -> None:
    whole, log = of_two_keys(tmp_path / "whole.db"), of_two_keys(tmp_path / "app.db", lacks=NEVER_STORED)
    for each in (whole, log):
        purge(each, ["tele/**"])
        forget_identities(each)

    maybe = [("maybe_removed", first) for first in range(0, 100, 20)]
    code, found, said = findings("gaps", whole)
    assert (code, found) == (0, maybe)
    assert "missing: 0" in said
    assert "or never stored: 50" in said
    assert findings("gaps", log)[:2] == (1, sorted([*maybe, ("between", NEVER_STORED)], key=lambda each: each[1]))


def test_events_that_were_removed_before_an_offload_are_not_missing_from_the_cold_tier(tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", EVENTS)
    removed = purge(log, ["audit/**"]).removed
    forget_identities(log)
    offload(spark(), log)
    trim(log)

    done = pipeline("gaps", log, "--check", "--json")

    assert done.code == 0
    assert {line["finding"] for line in done.lines} == {"maybe_removed"}
    assert sum(line["events"] for line in done.lines) == removed


def test_coverage_says_which_log_has_removed_an_event(tmp_path: Path) -> None:
    left, right = of_two_keys(tmp_path / "left.db"), of_two_keys(tmp_path / "right.db")
    purge(right, ["tele/**"])
    prune(left, Rules(until=15))

    code, found, said = findings("coverage", left, right)
    tele = [number for number in range(100) if number // 10 % 2 == 0]
    assert found == [("removed_left", number) for number in range(10, 15)] + [
        ("removed_right", number) for number in tele if number >= 15
    ]
    assert code == 0
    assert "removed: 5 by the first, 40 by the second" in said

    forget_identities(right)
    code, found, _ = findings("coverage", left, right)
    assert code == 1
    assert found[-1] == ("left_only", 89)
