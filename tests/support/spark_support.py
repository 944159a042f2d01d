"""One Spark session for all tests of a process, and logs to read with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import zbus
import zbus_spark

# What Java compiles well, it compiles for longer than the tests run.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@cache
def spark() -> SparkSession:
    """The session: two cores, as small as Spark is."""
    here = str(Path(__file__).parent)  # what tests pickle, workers can import
    with pytest.MonkeyPatch.context() as environment:  # of Java, which passes it on to all that it starts
        environment.setenv("SPARK_SUBMIT_OPTS", JAVA_OPTIONS)
        environment.setenv("PYTHONPATH", here, prepend=os.pathsep)
        return _start()


def _start() -> SparkSession:
    return zbus_spark.session(
        "local[2]",
        nice=0,  # or it would wait for the other tests
        spark__sql__shuffle__partitions="2",
        spark__driver__memory="1g",
        spark__python__daemon__module="spark_daemon",
    )


def write_log(path: Path, events: Iterable[tuple[str, Any]], headers: Mapping[str, str] | None = None) -> list[int]:
    """Publish (key, payload) pairs in order, one publisher a key; returns their offsets."""

    async def write() -> list[int]:
        offsets: list[int] = []
        async with zbus.open(path) as bus:
            publishers: dict[str, zbus.EventPublisher] = {}
            waiting = []
            for key, payload in events:
                if key not in publishers:
                    publishers[key] = await bus.publisher(key)
                waiting.append(asyncio.ensure_future(publishers[key].publish(payload, headers=headers)))
                if len(waiting) >= 1000:
                    offsets += await asyncio.gather(*waiting)
                    waiting.clear()
            offsets += await asyncio.gather(*waiting)
        return offsets

    return asyncio.run(write())
