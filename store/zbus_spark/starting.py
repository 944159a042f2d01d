"""A Spark session with suitable defaults: quiet, in UTC, on loopback if local, and with a clear error without Java.

Spark does batch work, so a local session runs at a lower priority than publishers on the same machine.
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
NICE = 10  # about a tenth of a processor that other processes use too, all of an idle one
_BANNER = b"Using incubator modules: jdk.incubator.vector"


def session(master: str = "local[*]", *, nice: int | None = None, **settings: str) -> SparkSession:
    """Return the session of this process, creating it if necessary: `session("spark://host:7077")` for a cluster.

    Write Spark's settings with `__` for each dot: `session(spark__driver__memory="4g")`. A local Spark and its Python
    workers run with niceness `nice` (default: `ZBUS_SPARK_NICE`, or 10), so that publishers on the same machine do not
    wait for it; 0 leaves the priority unchanged. Raises `ConfigInvalid` if Java is missing or too old.
    """
    nice = _niceness() if nice is None else nice
    version = java_version()
    if version is None or version < JAVA_VERSION_MIN:
        found = "it was not found" if version is None else f"this is Java {version}"
        raise ConfigInvalid("java", f"Spark needs Java {JAVA_VERSION_MIN} or later, but {found}: {JAVA_INSTALL}")
    # This logger prints errors that are also raised.
    logging.getLogger("DataFrameQueryContextLogger").disabled = True
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the executors need an interpreter with zbus
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
    # Spark finds `format("zbus")` through the session of the calling thread, which may differ from call to call.
    made._jvm.SparkSession.setActiveSession(made._jsparkSession)  # type: ignore[union-attr]
    return made


def _niceness() -> int:
    text = os.environ.get("ZBUS_SPARK_NICE") or str(NICE)
    if not (text.isascii() and text.isdigit() and int(text) <= 19):
        raise ConfigInvalid("ZBUS_SPARK_NICE", f"{text!r} is not a niceness from 0 to 19")
    return int(text)


def _lower_priority(nice: int) -> None:
    """Lower the priority of the Java process that was started. Its workers start later and inherit it.

    Linux has a priority for each thread, and a new thread inherits that of its creator: repeat until all have it.
    """
    java = getattr(SparkContext._gateway, "proc", None)
    with suppress(OSError):  # no /proc, or not permitted: leave the priority unchanged
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
    except ProcessLookupError:  # the thread has ended
        return 19


@contextmanager
def _without_banner() -> Iterator[None]:
    """Start Java with a stderr that drops the banner of every start and forwards all other lines."""
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
