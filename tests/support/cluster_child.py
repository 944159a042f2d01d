"""A driver on a cluster: reads a log through its node and prints what it counted.

    cluster_child.py MASTER URL EVENTS PARTITIONS [COLD]

It prints `under way N` once as many tasks are done, and then a line of JSON; also how many tasks were lost. With a
cold tier the log is read from there and from its node.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import zbus_spark

TASKS_DONE = 3


def watch(spark: Any, over: threading.Event, lost: dict[int, int]) -> None:
    tracker, reported = spark.sparkContext.statusTracker(), False
    while not over.is_set():
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is None:
                continue
            lost[stage] = max(lost.get(stage, 0), info.numFailedTasks)
            if not reported and TASKS_DONE <= info.numCompletedTasks < info.numTasks:
                print("under way", info.numCompletedTasks, flush=True)
                reported = True
        time.sleep(0.02)


def main(master: str, url: str, events: int, partitions: int, cold: str | None = None) -> None:
    spark = zbus_spark.session(
        master,
        spark__driver__host="127.0.0.1",
        spark__driver__bindAddress="127.0.0.1",
        spark__executor__memory="512m",
        spark__python__worker__reuse="true",
    )
    hosts = spark.range(4, numPartitions=4).count()
    over, lost = threading.Event(), dict[int, int]()
    watching = threading.Thread(target=watch, args=(spark, over, lost))
    watching.start()
    with zbus_spark.spark_errors():
        frame = zbus_spark.read(spark, url, cold=cold, rowsPerPartition=-(-events // partitions))
        found = frame.selectExpr(
            "count(*) AS events",
            "count(DISTINCT offset) AS offsets",
            "sum(offset) AS total",
            "sum(length(payload)) AS bytes",
            "count(DISTINCT key) AS keys",
        ).collect()[0]
    over.set()
    watching.join()
    print(json.dumps(found.asDict() | {"warm": hosts, "lost": sum(lost.values())}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
