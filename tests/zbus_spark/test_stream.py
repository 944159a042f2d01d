"""`spark.readStream.format("zbus")`: each event in one batch, across restarts, and a loss is never silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spark_support import spark, write_log

from zbus_log import Rules, SqliteLog
from zbus_spark import SparkFailed, spark_errors


class Follower:
    """A streaming query with a checkpoint, which is run repeatedly to the head of the log."""

    def __init__(self, log: Path, **options: object) -> None:
        self.log, self.checkpoint, self.options = log, log.parent / "checkpoint", options
        self.batches: list[list[int]] = []
        self.keys: set[str] = set()

    def run(self) -> list[list[int]]:
        """Return the offsets of each batch of this run."""
        self.batches = []
        stream = spark().readStream.format("zbus").options(**self.options).load(str(self.log))
        writer = stream.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self.checkpoint))
        with spark_errors():
            query = writer.trigger(availableNow=True).start()
            try:
                assert query.awaitTermination(90)
            finally:
                query.stop()
        return self.batches

    def _take(self, batch: Any, _: int) -> None:
        rows = batch.select("offset", "key").collect()
        self.batches.append(sorted(row.offset for row in rows))
        self.keys |= {row.key for row in rows}


def trim(log: Path, upto: int) -> None:
    owned = SqliteLog(str(log))
    owned.prune(Rules(max_events=owned.head() - upto))
    owned.close(5.0)


def test_a_query_resumes_after_a_restart_without_duplicates(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"1")] * 25)
    follower = Follower(log_path, maxRowsPerBatch=10)

    assert follower.run() == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    write_log(log_path, [("a/b", b"2")] * 7)
    assert follower.run() == [list(range(26, 33))]
    assert follower.run() == []


def test_keys_that_appear_later_are_found(log_path: Path) -> None:
    write_log(log_path, [("a/b", b""), ("x/y", b"")])
    follower = Follower(log_path, key="a/**")
    assert follower.run() == [[1]]

    write_log(log_path, [("a/new", b""), ("x/new", b""), ("a", b"")])

    assert follower.run() == [[3, 5]]
    assert follower.keys == {"a/b", "a/new", "a"}


def test_a_stream_starts_at_the_given_position(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"")] * 10)

    assert Follower(log_path, startOffset=7).run() == [[7, 8, 9, 10]]


def test_a_stream_of_a_trimmed_log_begins_where_the_log_does(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"")] * 9000)
    trim(log_path, 8000)

    assert Follower(log_path).run() == [list(range(8001, 9001))]


def test_a_trim_under_a_query_is_an_error_unless_data_loss_is_allowed(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"")] * 5)
    follower = Follower(log_path)
    assert follower.run() == [[1, 2, 3, 4, 5]]
    write_log(log_path, [("a/b", b"")] * 9000)
    trim(log_path, 8000)

    with pytest.raises(SparkFailed, match="8000"):
        follower.run()
    follower.options = {"failOnDataLoss": False}
    assert follower.run() == [list(range(8001, 9006))]


def test_another_log_with_the_same_checkpoint_is_rejected(log_path: Path, tmp_path: Path) -> None:
    write_log(log_path, [("a/b", b"")] * 5)
    follower = Follower(log_path)
    follower.run()
    follower.log = tmp_path / "other.db"
    write_log(follower.log, [("a/b", b"")] * 3)

    with pytest.raises(SparkFailed, match="begin with a new checkpointLocation"):
        follower.run()


def test_a_stream_has_no_end(log_path: Path) -> None:
    write_log(log_path, [("a/b", b"")])

    with pytest.raises(SparkFailed, match="a stream has no end"):
        Follower(log_path, endOffset=3).run()
