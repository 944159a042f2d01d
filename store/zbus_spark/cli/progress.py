"""Progress of Spark in a command: a bar of tasks on a terminal, nothing elsewhere, and errors in one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession
from rich.progress import Progress, TaskID

from zbus.cli.render.output import progress
from zbus_spark.failures import spark_errors
from zbus_spark.starting import session

LOOK_S = 0.2


@contextmanager
def working(title: str, master: str) -> Iterator[SparkSession]:
    """Yield a Spark session. Shows the progress of its tasks on stderr, and raises its errors as `SparkFailed`."""
    with progress("tasks") as bar, spark_errors():
        task = bar.add_task("starting Spark", total=None)
        spark = session(master)
        bar.update(task, description=title)
        if bar.disable:
            yield spark
            return
        done = threading.Event()
        watching = threading.Thread(
            target=_watch, args=(spark.sparkContext, bar, task, done), name="zbus-pipeline-progress", daemon=True
        )
        watching.start()
        try:
            yield spark
        finally:
            done.set()
            watching.join()


def _watch(context: SparkContext, bar: Progress, task: TaskID, done: threading.Event) -> None:
    """Update the bar with the tasks of all stages seen so far. A stage that is no longer active has ended."""
    stages: dict[int, tuple[int, int]] = {}
    tracker = context.statusTracker()
    with suppress(Py4JError, ConnectionError):  # Spark has ended: the code that uses it raises the error
        while not done.wait(LOOK_S):
            stages = {stage: (tasks, tasks) for stage, (tasks, _) in stages.items()}
            for job in tracker.getActiveJobsIds():
                found = tracker.getJobInfo(job)
                for stage in found.stageIds if found else ():
                    if about := tracker.getStageInfo(stage):
                        stages[stage] = (about.numTasks, about.numCompletedTasks)
            total, completed = map(sum, zip(*stages.values(), strict=True)) if stages else (None, 0)
            bar.update(task, total=total, completed=completed)
