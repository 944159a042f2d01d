"""Shared options of `zbus pipeline`: the log, the part of it to read, and the Spark master."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pyspark.sql import DataFrame, SparkSession

from zbus.cli.render.values import parse_position
from zbus.deliver.start_position import to_ns
from zbus_log.cli.options import check_is_there
from zbus_log.cold.tier import Cold
from zbus_spark.columns import schema_of
from zbus_spark.offsets import before, following
from zbus_spark.options import ReadOptions
from zbus_spark.partitions import bounds
from zbus_spark.reading import read
from zbus_spark.removed_events import RemovedEvents, removed_events

_LOG = "The log: a SQLite file of zbus, or the URL of a node that serves it, such as zenoh://127.0.0.1:7447."

LogArgument = Annotated[
    str, typer.Argument(envvar="ZBUS_LOG", metavar="LOG", help=_LOG, show_default=False, show_envvar=False)
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="EXPR", help="Read only keys that match this expression; repeatable."),
]
AfterOption = Annotated[
    Any,
    typer.Option(
        "--after",
        parser=parse_position,
        metavar="POSITION",
        help="Read after this offset, ISO time, or age such as -10m.",
    ),
]
UntilOption = Annotated[
    Any,
    typer.Option("--until", parser=parse_position, metavar="POSITION", help="Read up to this offset, ISO time or age."),
]
MasterOption = Annotated[
    str, typer.Option("--master", metavar="URL", help="Spark master: local, or a URL such as spark://host:7077.")
]
ColdOption = Annotated[
    Path | None,
    typer.Option("--cold", metavar="FOLDER", help="Folder of the cold tier; default: LOG-cold.", show_default=False),
]
ShownOption = Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Maximum number of rows to print.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Exit with 1 if events are missing.")]

LOCAL = "local[*]"


def load(
    spark: SparkSession,
    log: str,
    columns: Sequence[str],
    key: Sequence[str] | None = None,
    after: Any = None,
    until: Any = None,
    cold: Path | None = None,
) -> DataFrame:
    """Return the part of a log that the options select, from the log and its cold tier: a snapshot."""
    _check(log)
    return read(spark, log, key=key or None, cold=cold, columns=columns, **_range(after, until))


def load_stream(
    spark: SparkSession, log: str, columns: Sequence[str], key: Sequence[str] | None = None, after: Any = None
) -> DataFrame:
    """Return the part of a log that the options select as a stream, without the cold tier."""
    _check(log)
    chosen = _range(after, None) | ({"key": " ".join(key)} if key else {})
    return spark.readStream.format("zbus").options(**chosen).schema(schema_of(columns)).load(log)


def low_water_of(log: str, cold: Path | None) -> int:
    """Return the offset up to which events are neither in the log nor in its cold tier."""
    hot = bounds(ReadOptions.parse({"path": log}))[0]
    if "://" in log and cold is None:
        return hot
    tier = Cold(cold or f"{log}-cold")
    return min(hot, before(tier.first)) if tier.first and tier.last >= hot else hot


def removed_by(log: str, cold: Path | None = None) -> Callable[[], RemovedEvents] | None:
    """Return a function that reads which events a log has removed; None for the log of a node, which does not say."""
    return None if "://" in log else partial(removed_events, log, cold)


def _check(log: str) -> None:
    if "://" not in log:
        check_is_there(Path(log))


def _range(after: Any, until: Any) -> dict[str, str]:
    """Return the options of the source. As in a replay, `after` is excluded and `until` is included."""
    chosen: dict[str, str] = {}
    if after is not None:
        by_time = isinstance(after, datetime)
        chosen |= {"fromNs": str(to_ns(after) + 1)} if by_time else {"startOffset": str(following(after))}
    if until is not None:
        chosen |= {"toNs": str(to_ns(until))} if isinstance(until, datetime) else {"endOffset": str(until)}
    return chosen
