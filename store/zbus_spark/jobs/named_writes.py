"""Writes with a name, by which what they publish is published once."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from zbus_spark.commit import published


def write(frame: DataFrame, log: Path, sink_id: str, **options: str) -> int:
    """Publish rows to a log under a name; return how many events were published under it."""
    if SparkSession.getActiveSession() is None:
        # Spark finds a sink by the session of the thread, and a thread of ours has none until this is called in it.
        frame.sparkSession.createDataFrame([], "key string")
    frame.write.format("zbus").mode("append").options(**options, sinkId=sink_id).save(str(log))
    return published(log, sink_id) or 0
