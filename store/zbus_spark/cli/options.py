"""What the commands of `zbus pipeline` share: which log, which part of it, and where Spark runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pyspark.sql import DataFrame, SparkSession

from zbus.cli.render.values import parse_position
from zbus.deliver.start_position import to_ns
from zbus_log.cli.options import check_is_there
from zbus_log.cold.tier import Cold
from zbus_spark.columns import schema_of
from zbus_spark.options import ReadOptions
from zbus_spark.partitions import bounds
from zbus_spark.reading import read

_LOG = "The log: a SQLite file of zbus, or a node that serves it, such as zenoh://127.0.0.1:7447."

LogArgument = Annotated[
    str, typer.Argument(envvar="ZBUS_LOG", metavar="LOG", help=_LOG, show_default=False, show_envvar=False)
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="EXPR", help="Only keys that this expression matches; may be given several times."),
]
AfterOption = Annotated[
    Any,
    typer.Option(
        "--after",
        parser=parse_position,
        metavar="POSITION",
        help="From after this offset, ISO time, or age such as -10m.",
    ),
]
UntilOption = Annotated[
    Any,
    typer.Option("--until", parser=parse_position, metavar="POSITION", help="Up to this offset, ISO time or age."),
]
MasterOption = Annotated[
    str, typer.Option("--master", metavar="URL", help="Where Spark runs: here, or such as spark://host:7077.")
]
ColdOption = Annotated[
    Path | None, typer.Option("--cold", metavar="FOLDER", help="The cold tier; default: LOG-cold.", show_default=False)
]
ShownOption = Annotated[int, typer.Option("--rows", min=1, metavar="N", help="How many rows of the table to print.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Exit with 1 if anything is missing.")]

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
    """The part of a log that the options name, hot and cold as one DataFrame: a snapshot of this moment."""
    _check(log)
    return read(spark, log, key=key or None, cold=cold, columns=columns, **_range(after, until))


def load_stream(
    spark: SparkSession, log: str, columns: Sequence[str], key: Sequence[str] | None = None, after: Any = None
) -> DataFrame:
    """The same of a log that goes on, from what its file holds."""
    _check(log)
    chosen = _range(after, None) | ({"key": " ".join(key)} if key else {})
    return spark.readStream.format("zbus").options(**chosen).schema(schema_of(columns)).load(log)


def low_water_of(log: str, cold: Path | None) -> int:
    """Everything up to this offset is neither in the log nor in its cold tier."""
    hot = bounds(ReadOptions.parse({"path": log}))[0]
    if "://" in log and cold is None:
        return hot
    tier = Cold(cold or f"{log}-cold")
    return min(hot, tier.first - 1) if tier.first and tier.last >= hot else hot


def _check(log: str) -> None:
    if "://" not in log:
        check_is_there(Path(log))


def _range(after: Any, until: Any) -> dict[str, str]:
    """In the spelling of the source. As in a replay `after` itself is left out, and `until` is included."""
    chosen: dict[str, str] = {}
    if after is not None:
        by_time = isinstance(after, datetime)
        chosen |= {"fromNs": str(to_ns(after) + 1)} if by_time else {"startOffset": str(after + 1)}
    if until is not None:
        chosen |= {"toNs": str(to_ns(until))} if isinstance(until, datetime) else {"endOffset": str(until)}
    return chosen
