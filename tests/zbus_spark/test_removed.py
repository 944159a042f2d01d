"""Spark reads and offloads a log from whose middle events were removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_support import raw
from pyspark.errors import PySparkException
from spark_support import spark
from tier_support import hot, make_log, rows

from zbus_log import purge, verify
from zbus_spark.jobs.offload import offload
from zbus_spark.jobs.trim import trim
from zbus_spark.reading import read

EVENTS = 9_000


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
