"""Named writes: rows that are written again under the same name are published only once."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from zbus_spark.commit import published


def write(frame: DataFrame, log: Path, sink_id: str, **options: str) -> int:
    """Publish rows to a log under a name. Returns the number of events published under it."""
    if SparkSession.getActiveSession() is None:
        # Spark finds a sink through the session of the thread, which this call sets in a new thread.
        frame.sparkSession.createDataFrame([], "key string")
    frame.write.format("zbus").mode("append").options(**options, sinkId=sink_id).save(str(log))
    return published(log, sink_id) or 0
