"""Spark reads a log over a transport as it reads the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from remote_support import free_url, node_at, stored, trim
from spark_support import spark
from tier_support import SEGMENT_EVENTS, hot, make_log, rows

from zbus.errors import ConfigInvalid
from zbus_log import Rules, prune
from zbus_spark import SparkFailed, spark_errors
from zbus_spark import offload as spark_offload
from zbus_spark import read as spark_read


@pytest.fixture
def url() -> Iterator[str]:
    with free_url() as found:
        yield found


def by_spark(place: str | Path, **options: object) -> list[Any]:
    """Return all columns that Spark reads."""
    with spark_errors():
        return rows(spark().read.format("zbus").options(**options).load(str(place)))


def test_spark_reads_by_url_every_column_that_it_reads_from_the_file(url: str, log_path: Path) -> None:
    with node_at(url, log_path) as bus:
        for number in range(3):
            bus.publisher("shop/orders/paid").publish_many([b"o%d" % number] * 1_000, headers={"tenant": "x"})
            bus.publisher("audit").publish_many([b"a"] * 10)
        assert bus._inner._node.network is not None
        origin = {"origin": f"{bus._inner._node.network.origin:x}", "timeoutS": 20}
        half = stored(log_path)[1_500].published_at

        def same(**options: object) -> list[int]:
            found = by_spark(url, **options, **origin)
            assert found == by_spark(url, **options) == by_spark(log_path, **options)
            return [row[0] for row in found]

        assert same() == list(range(1, 3_031))
        assert same(startOffset=500, endOffset=2_600, rowsPerPartition=700) == list(range(500, 2_601))
        assert len(same(key="audit/** none/*")) == 30
        assert 0 < len(same(fromNs=half)) < 3_030

        trim(bus, 1_000)
        assert same() == same(startOffset=5, failOnDataLoss=False) == list(range(2_031, 3_031))
        for gone in ({"startOffset": 5}, {"endOffset": 2_030}, {"toNs": 5}):
            with pytest.raises(SparkFailed, match="to 2030 were removed by retention"):
                by_spark(url, **gone)


def test_a_stream_by_url_resumes_at_its_position(url: str, log_path: Path, tmp_path: Path) -> None:
    def follow() -> list[list[int]]:
        batches: list[list[int]] = []

        def take(batch: Any, _: int) -> None:
            batches.append(sorted(row.offset for row in batch.select("offset").collect()))

        stream = spark().readStream.format("zbus").options(key="shop/*", maxRowsPerBatch=20).load(url)
        writer = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()
        return batches

    with node_at(url, log_path) as bus:
        bus.publisher("shop/orders").publish_many([b"x"] * 30)
        assert follow() == [list(range(1, 21)), list(range(21, 31))]
        bus.publisher("audit/x").publish_many([b"x"] * 5)
        bus.publisher("shop/orders").publish_many([b"x"] * 5)
        assert follow() == [list(range(36, 41))]


def test_the_tier_is_read_beside_a_log_by_url_wherever_spark_can_read_it(url: str, tmp_path: Path) -> None:
    log = make_log(tmp_path / "app.db", 9_000)
    before = hot(log)
    spark_offload(spark(), log, segment_events=SEGMENT_EVENTS)
    prune(log, Rules(until=5_000))
    tier = (tmp_path / "app.db-cold").rename(tmp_path / "elsewhere")  # where the node does not look
    # A file system of Hadoop's that is not the local one: paths of others, under names of its own.
    spark()._jsc.hadoopConfiguration().set("fs.viewfs.mounttable.far.link./tier", f"file://{tier}")
    with node_at(url, log):
        for cold in (tier, f"file://{tier}", "viewfs://far/tier"):
            assert rows(spark_read(spark(), url, cold=cold)) == before
            part = spark_read(spark(), url, cold=cold, key="shop/**", start=100, end=8_500)
            assert rows(part) == [row for row in before if row[1].startswith("shop/") and 100 <= row[0] <= 8_500]
        with pytest.raises(ConfigInvalid, match="there is no cold tier"):
            spark_read(spark(), url, cold="viewfs://far/tier/none")
        assert rows(spark_read(spark(), url)) == before[5_000:]
