"""What the tests of Spark's jobs share: events as DataFrames, and commands in this process, beside its one session."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, Row
from spark_support import spark

import zbus_log
from zbus.cli.app import run
from zbus.headers import encode_headers
from zbus_log import put
from zbus_spark.columns import SCHEMA, parts

BEGIN_NS = 1_790_000_040_000_000_000  # the beginning of a minute
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Stored(NamedTuple):
    """An event as a test writes it down; its offset is its place."""

    publisher_id: int = 1
    sequence: int = 0
    key: str = "a/b/c"
    published_ns: int = BEGIN_NS
    payload: bytes = b""
    headers: Mapping[str, str] = {}


def frame(events: Iterable[Stored], partitions: int = 2) -> DataFrame:
    """Events with the columns of a log."""
    rows = [
        (
            offset,
            *parts(event.key),
            event.publisher_id,
            event.sequence,
            at(event.published_ns),
            event.published_ns,
            dict(event.headers),
            event.payload,
        )
        for offset, event in enumerate(events, 1)
    ]
    return spark().createDataFrame(rows, SCHEMA).repartition(partitions)


def store(path: Path, events: Iterable[Stored]) -> Path:
    """The same as a log."""
    rows = [
        zbus_log.Row(
            each.publisher_id,
            each.sequence,
            each.published_ns,
            each.key,
            each.payload,
            encode_headers(each.headers, None, None),
        )
        for each in events
    ]
    put(path, [rows])
    return path


def at(time_ns: int) -> datetime:
    return EPOCH + timedelta(microseconds=time_ns // 1000)


def utc(time: datetime) -> datetime:
    """Spark hands out times in the zone of this process, without saying so."""
    return time.astimezone(UTC)


def plain(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    return [tuple(utc(value) if isinstance(value, datetime) else value for value in row) for row in rows]


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def pipeline(*arguments: object) -> Done:
    """`zbus pipeline …` in this process; what it wrote to its two outputs is caught below Python's own buffers."""
    spark()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = [os.dup(1), os.dup(2)]
        try:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = run(["pipeline", *map(str, arguments)])
        finally:
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
        return Done(code, *(_text(file.fileno()) for file in (out, err)))


def _text(descriptor: int) -> str:
    return os.pread(descriptor, 1 << 26, 0).decode()
