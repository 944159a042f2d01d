"""Writes with a name, by which what they publish is published once: doing one, and whether one was done."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from zbus_log.cursors import SqliteCursors
from zbus_spark.commit import Turn, _load_mark


def write(frame: DataFrame, log: Path, sink_id: str, **options: str) -> int:
    """Publish rows to a log under a name; return how many events were published under it."""
    if SparkSession.getActiveSession() is None:
        # Spark finds a sink by the session of the thread, and a thread of ours has none until this is called in it.
        frame.sparkSession.createDataFrame([], "key string")
    frame.write.format("zbus").mode("append").options(**options, sinkId=sink_id).save(str(log))
    return published(log, sink_id) or 0


def published(log: Path, sink_id: str) -> int | None:
    """How many events were published to a log under this name; None where no write under it is done."""
    if not Path(f"{log}-cursors").is_file():
        return None
    cursors = SqliteCursors(str(log))
    try:
        mark = _load_mark(cursors, Turn(sink_id))
    finally:
        cursors.close(5.0)
    return None if mark is None else mark.next_sequence
