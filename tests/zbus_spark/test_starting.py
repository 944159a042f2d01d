"""The Spark session: it runs at a lower priority than publishers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest
from pyspark import SparkContext
from spark_support import spark

from zbus.errors import ConfigInvalid
from zbus_spark.starting import NICE, _lower_priority, _niceness, session

# The tests' own session does not give way, or it would wait for the other tests.
LOOK = """
import json, os
import zbus_spark
from pyspark import SparkContext

def nice_of_worker(batches):
    for batch in batches:
        batch["id"] = os.nice(0)
        yield batch

spark = zbus_spark.session("local[2]")
workers = {row.id for row in spark.range(0, 8, 1, 4).mapInPandas(nice_of_worker, "id long").collect()}
tasks = os.listdir(f"/proc/{SparkContext._gateway.proc.pid}/task")
java = [os.getpriority(os.PRIO_PROCESS, int(task)) for task in tasks]
print(json.dumps([sorted(workers), sorted(set(java)), os.nice(0)]))
"""


@pytest.mark.nightly  # a Spark of its own
def test_a_local_spark_and_its_workers_have_a_lower_priority() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, check=True, text=True)

    workers, java, user = json.loads(done.stdout)

    assert (workers, java) == ([NICE], [NICE])
    assert user == os.nice(0), "the priority of the user's process is unchanged"


def test_nice_0_leaves_the_priority_unchanged() -> None:
    spark()

    java, found = SparkContext._gateway.proc.pid, set[int]()  # type: ignore[union-attr]
    for task in os.listdir(f"/proc/{java}/task"):
        with suppress(ProcessLookupError):  # a thread that has ended since
            found.add(os.getpriority(os.PRIO_PROCESS, int(task)))
    assert found == {os.nice(0)}


def test_if_priorities_cannot_be_changed_spark_runs_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def missing(_: object) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory")

    spark()
    monkeypatch.setattr(os, "setpriority", refused)
    _lower_priority(19)
    monkeypatch.setattr(os, "listdir", missing)
    _lower_priority(19)


def test_the_environment_sets_the_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZBUS_SPARK_NICE", raising=False)
    assert _niceness() == NICE
    monkeypatch.setenv("ZBUS_SPARK_NICE", "3")
    assert _niceness() == 3
    for wrong in ("-1", "20", "much"):
        monkeypatch.setenv("ZBUS_SPARK_NICE", wrong)
        with pytest.raises(ConfigInvalid, match="niceness"):
            session()
