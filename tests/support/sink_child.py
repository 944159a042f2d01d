"""The process that the tests of the sink kill: queries that each stop at a chosen point of a batch, and wait there.

A query that waits is as good as one that is killed at that point, so one JVM serves for all of them. Also what the
tests do with what is left: kill, go on from the checkpoint, and see what the log holds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from log_support import wait_until
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, WriterCommitMessage
from pyspark.sql.types import StructType

import zbus
import zbus_log
import zbus_spark
from zbus.util.process import is_running
from zbus_spark import commit
from zbus_spark.sink import Staged, StreamWriter, _parts, _Plan

# While rows are staged; with the intent written; in the middle of the put; after it; with the batch marked as done.
POINTS = ("staging", "intent", "put", "mark", "done")
BATCHES, LINES = 3, 4000
HELD_BATCH = 1
HELD_CHUNKS = 3  # of a put: two of them, at least, are stored then


class HeldSource(DataSource):
    """The sink of zbus, but a batch of it stops at the point that an option names."""

    @classmethod
    def name(cls) -> str:
        return "zbus-held"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        options = dict(self.options)
        point = options.pop("point")
        return HeldWriter(_Plan(options, schema, overwrite), point)


class HeldWriter(StreamWriter):
    def __init__(self, plan: _Plan, point: str) -> None:
        super().__init__(plan)
        self.point = point

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        task = TaskContext.get()
        assert task is not None
        if self.point == "staging" and int(task.getLocalProperty("streaming.sql.batchId") or 0) == HELD_BATCH:
            iterator = self._cut(iterator, 1)
        return super().write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        put = zbus_log.put

        def held(log: Path, chunks: Iterable[Sequence[Any]]) -> None:
            if self.point == "intent":
                self._hold()
            put(log, self._cut(chunks, HELD_CHUNKS) if self.point == "put" else chunks)
            if self.point == "mark":
                self._hold()

        if batchId == HELD_BATCH:
            commit.put = held  # type: ignore[assignment, attr-defined]
        super().commit(messages, batchId)
        if batchId == HELD_BATCH:
            self._hold()

    def _cut(self, items: Iterable[Any], count: int) -> Iterator[Any]:
        for number, item in enumerate(items):
            if number == count:
                break
            yield item
        self._hold()

    def _hold(self) -> None:
        reached = self.plan.log.with_name("reached")
        reached.with_suffix(".tmp").write_text(str(os.getpid()))
        reached.with_suffix(".tmp").rename(reached)
        while not self.plan.log.with_name("go-on").exists():
            time.sleep(0.01)


class ForgetfulSource(DataSource):
    """The control: a sink that publishes whatever Spark gives it, as if every batch were new."""

    @classmethod
    def name(cls) -> str:
        return "zbus-forgetful"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return ForgetfulWriter(_Plan(self.options, schema, overwrite))


class ForgetfulWriter(StreamWriter):
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        commit.publish_unnamed(self.plan.log, _parts(messages))


def make_input(folder: Path) -> Path:
    """Text files, each of which is a batch."""
    made = folder / "in"
    made.mkdir()
    for batch in range(BATCHES):
        file = made / f"{batch}.txt"
        file.write_text("".join(f"{batch}/{line}\n" for line in range(LINES)))
        os.utime(file, (1_700_000_000 + batch,) * 2)  # which is the order in which Spark takes them
    return made


def query(spark: SparkSession, folder: Path, form: str = "zbus", **options: str) -> Any:
    """The query of one point, from its checkpoint on; its rows are shuffled."""
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder.parent / "in"))
    writing = lines.selectExpr("value AS payload").repartition(2).writeStream.format(form).options(**options)
    writing = writing.option("key", "lines/all").option("checkpointLocation", str(folder / "checkpoint"))
    return writing.trigger(availableNow=True).start(str(folder / "app.db"))


def go_on(spark: SparkSession, folder: Path, form: str = "zbus") -> None:
    """Run the query of one point to its end."""
    with zbus_spark.spark_errors():
        query(spark, folder, form).awaitTermination()


def kill_at(folder: Path, points: Sequence[str], workers_too: bool = True, deadline_s: float = 200.0) -> None:
    """Run a query for each point until all of them wait there; then kill the JVM and what runs below it."""
    make_input(folder)
    for point in points:
        (folder / point).mkdir()
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [sys.executable, __file__, str(folder), *points],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stderr=subprocess.PIPE,
    )
    reached = [folder / point / "reached" for point in points]
    try:
        wait_until(lambda: child.poll() is not None or all(each.exists() for each in reached), deadline_s)
        assert child.poll() is None, child.communicate()[1].decode()[-3000:]
    finally:
        pids = [int((folder / "jvm").read_text())] if (folder / "jvm").exists() else []
        pids += [int(each.read_text()) for each in reached if each.exists() and workers_too]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        child.kill()
        child.communicate()
    wait_until(lambda: not any(is_running(pid) for pid in pids[1:]))


def surplus(folder: Path) -> Counter[str]:
    """How often each line is in the log beyond once: nothing where every one is there exactly once."""
    wanted = Counter(line for file in (folder.parent / "in").iterdir() for line in file.read_text().splitlines())
    found = Counter(event.payload.decode() for event in stored(folder / "app.db"))
    found.subtract(wanted)
    return Counter({line: count for line, count in found.items() if count})


def stored(log: Path) -> list[zbus.Event]:
    """All events of a log."""

    async def read() -> list[zbus.Event]:
        async with zbus.open(log, read_only=True) as bus:
            return [event async for event in bus.replay()]

    return asyncio.run(read())


def left(log: Path) -> list[str]:
    """What lies beside a log that should not."""
    folders = log.parent.glob(f"{log.name}-staging*")
    return sorted(str(each.relative_to(log.parent)) for folder in folders for each in (folder, *folder.rglob("*")))


def main(folder: Path, points: list[str]) -> None:
    spark = zbus_spark.session(f"local[{len(points) + 2}]", spark__sql__shuffle__partitions="2")
    gateway: Any = spark.sparkContext._gateway
    (folder / "jvm").write_text(str(gateway.proc.pid))
    spark.dataSource.register(HeldSource)
    for running in [query(spark, folder / point, "zbus-held", point=point) for point in points]:
        running.awaitTermination()


if __name__ == "__main__":
    import sink_child  # as a module that Spark's workers can import

    sink_child.main(Path(sys.argv[1]), sys.argv[2:])
