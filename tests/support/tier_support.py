"""What the tests of the cold tier in Spark share: logs with some history, and looks at what lies in a tier."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from log_support import append, ask, raw, wait_until
from pyspark.sql import DataFrame
from spark_support import spark

import zbus
from zbus.headers import encode_headers
from zbus.ports.log import Row
from zbus_log import SqliteLog
from zbus_log.file.tables import BLOCK

SEGMENT_EVENTS = 8192  # two blocks of the log
NIGHT_NS = 1_767_225_590_000_000_000  # ten seconds before the year 2026 begins
KEYS = ("shop/orders/created", "shop/orders/paid", "audit/log", "shop/news", "odd=name%/it's")


def history(first: int, events: int, keys: Iterable[str] = KEYS) -> list[Row]:
    """Rows that go over midnight, some of them with headers, none with the payload of another."""
    names = list(keys)
    return [
        Row(
            7,
            number,
            NIGHT_NS + number * 1_000_003,
            names[number % len(names)],
            b"payload %d" % number,
            encode_headers({"trace": f"{number}"}, None, None) if number % 7 == 0 else None,
        )
        for number in range(first, first + events)
    ]


def make_log(path: Path, events: int, first: int = 0, keys: Iterable[str] = KEYS) -> Path:
    """A log with that many more events, every full block of it sealed."""
    log = SqliteLog(str(path), synchronous="OFF")
    try:
        last = append(log, history(first, events, keys))[-1]
        wait_until(lambda: ask(path, "SELECT ifnull(max(block), -1) FROM blocks") == (last + 1) // BLOCK - 1)
    finally:
        log.close(5.0)
    return path


def rows(frame: DataFrame) -> list[Any]:
    """All rows, in the order of the log."""
    return sorted(map(tuple, frame.collect()), key=lambda row: row[0])


def hot(path: Path) -> list[Any]:
    """What the log's file has."""
    return rows(spark().read.format("zbus").load(str(path)))


async def replayed(path: Path, *keys: str) -> list[Any]:
    """Return the events as a subscriber would receive them, including headers."""
    async with zbus.open(path, read_only=True) as bus:
        return [
            (each.offset, each.identity, each.published_at, each.key, each.payload, dict(each.headers))
            async for each in bus.replay(*(keys or ("**",)))
        ]


def in_tier(folder: Path) -> set[str]:
    """What lies in a tier, but for the lock and the manifest."""
    return {each.name for each in folder.iterdir()} - {".lock", "manifest.json"}


def damage(path: Path, change: str) -> None:
    """Change events that are stored, past the log."""
    connection = raw(path)
    try:
        for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(change)
    finally:
        connection.close()
