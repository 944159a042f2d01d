"""A driver on a cluster: reads a log through its node and prints what it counted.

    cluster_child.py MASTER URL EVENTS PARTITIONS

It prints `under way N` once as many tasks are done, and then a line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import zbus_spark

TASKS_DONE = 3


def watch(spark: Any, over: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    while not over.is_set():
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None and TASKS_DONE <= info.numCompletedTasks < info.numTasks:
                print("under way", info.numCompletedTasks, flush=True)
                return
        time.sleep(0.02)


def main(master: str, url: str, events: int, partitions: int) -> None:
    spark = zbus_spark.session(
        master,
        spark__driver__host="127.0.0.1",
        spark__driver__bindAddress="127.0.0.1",
        spark__executor__memory="512m",
        spark__python__worker__reuse="true",
    )
    hosts = spark.range(4, numPartitions=4).count()
    over = threading.Event()
    watching = threading.Thread(target=watch, args=(spark, over))
    watching.start()
    with zbus_spark.spark_errors():
        frame = spark.read.format("zbus").option("rowsPerPartition", -(-events // partitions)).load(url)
        found = frame.selectExpr(
            "count(*) AS events",
            "count(DISTINCT offset) AS offsets",
            "sum(offset) AS total",
            "sum(length(payload)) AS bytes",
            "count(DISTINCT key) AS keys",
        ).collect()[0]
    over.set()
    watching.join()
    print(json.dumps(found.asDict() | {"warm": hosts}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
