"""A Spark session that behaves: quiet, in UTC, on loopback where it is local, and clear where Java is missing.

What Spark does is batch work. Where it runs on the machine of those who publish, it gives way to them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

from zbus.cli.java import JAVA_INSTALL, JAVA_VERSION_MIN, java_version
from zbus.errors import ConfigInvalid

from .failures import spark_errors

QUIET = Path(__file__).with_name("quiet.properties")
NICE = 10  # a tenth of the processor where somebody else wants it, all of it where nobody does
_BANNER = b"Using incubator modules: jdk.incubator.vector"


def session(master: str = "local[*]", *, nice: int | None = None, **settings: str) -> SparkSession:
    """The session of this process, made if there is none: `session("spark://host:7077")` for a cluster.

    Settings of Spark are given with `__` for each dot: `session(spark__driver__memory="4g")`. A local Spark runs with
    niceness `nice` (or what `ZBUS_SPARK_NICE` says, or 10), its Python workers too, so that publishers on the same
    machine do not wait for it; 0 leaves it as it is.
    """
    nice = _niceness() if nice is None else nice
    version = java_version()
    if version is None or version < JAVA_VERSION_MIN:
        found = "there is none" if version is None else f"this is {version}"
        raise ConfigInvalid("java", f"Spark needs Java {JAVA_VERSION_MIN} or later, and {found}: {JAVA_INSTALL}")
    # It prints what is also raised.
    logging.getLogger("DataFrameQueryContextLogger").disabled = True
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the executors' interpreter has zbus too
    chosen = {
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={QUIET} -Duser.timezone=UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
    }
    if master.startswith("local"):
        chosen |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        chosen |= {"spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1))}
    chosen |= {name.replace("__", "."): value for name, value in settings.items()}
    builder = SparkSession.builder.master(master).appName("zbus")
    for name, value in chosen.items():
        builder = builder.config(name, value)
    started_here = SparkContext._gateway is None
    with spark_errors(), _without_banner():
        made = builder.getOrCreate()
    if started_here and nice > 0 and master.startswith("local"):
        _lower_priority(nice)
    # Spark looks for `format("zbus")` through the session of the calling thread, which may be another one each time.
    made._jvm.SparkSession.setActiveSession(made._jsparkSession)  # type: ignore[union-attr]
    return made


def _niceness() -> int:
    text = os.environ.get("ZBUS_SPARK_NICE") or str(NICE)
    if not (text.isascii() and text.isdigit() and int(text) <= 19):
        raise ConfigInvalid("ZBUS_SPARK_NICE", f"{text!r} is no niceness from 0 to 19")
    return int(text)


def _lower_priority(nice: int) -> None:
    """Lower the priority of the Java that was started. Its workers do not run yet, and inherit it.

    Linux has a priority for each thread, and a new one takes that of its creator: look until all have it.
    """
    java = getattr(SparkContext._gateway, "proc", None)
    with suppress(OSError):  # no such folder, or not permitted: it runs as it is
        while java is not None:
            tasks = [int(task.name) for task in Path(f"/proc/{java.pid}/task").iterdir()]
            higher = [task for task in tasks if _nice_of(task) < nice]
            if not higher:
                return
            for task in higher:
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, task, nice)


def _nice_of(task: int) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, task)
    except ProcessLookupError:  # it has ended
        return 19


@contextmanager
def _without_banner() -> Iterator[None]:
    """Start Java with a stderr that leaves out what it says at every start of Spark; all the rest goes through."""
    if SparkContext._gateway is not None:
        yield
        return
    own = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        threading.Thread(target=_forward_lines, args=(reading,), name="spark-stderr", daemon=True).start()


def _forward_lines(reading: int) -> None:
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if _BANNER not in line:
                os.write(2, line)
