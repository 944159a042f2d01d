"""One Spark session for all tests of a process, and logs to read with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import zbus
import zbus_spark


@cache
def spark() -> SparkSession:
    """The session: two cores, as small as Spark is."""
    return zbus_spark.session(
        "local[2]",
        nice=0,  # or it would wait for the other tests
        spark__sql__shuffle__partitions="2",
        spark__driver__memory="1g",
        spark__executorEnv__PYTHONPATH=str(Path(__file__).parent),  # what tests pickle, workers can import
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
