"""Sessions: events with the same value of a field, without a long pause between them."""

from __future__ import annotations

import re

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from zbus.errors import ConfigInvalid

from .durations import milliseconds

_FIELD = re.compile(r"[^\[\]'*?$.]+(?:\.[^\[\]'*?$.]+)*")


def columns(by: str) -> tuple[str, ...]:
    """Return the columns that are needed to find sessions."""
    return "key", "published_ns", _parse(by)[0]


def sessions(df: DataFrame, by: str, gap: str = "30 minutes") -> DataFrame:
    """Return one row for each session: value, session (numbered from 1), start, end, duration_ms, events, keys.

    `by` is `header:NAME` or `payload:FIELD`; write nested fields with dots: `payload:user.id`. A session ends after
    `gap` without an event. Events without the field are counted in one row, whose value and session are null.
    """
    gap_ns = milliseconds("gap", gap) * 1_000_000
    value, time = F.col("value"), F.col("published_ns")
    in_time = Window.partitionBy("value").orderBy("published_ns")
    begins = value.isNotNull() & F.coalesce(time - F.lag(time).over(in_time) >= gap_ns, F.lit(True))
    numbered = (
        df.select(value_of(by).alias("value"), "published_ns", "key")
        .withColumn("begins", begins.cast("int"))
        .withColumn("session", F.sum("begins").over(in_time))
    )
    found = numbered.groupBy("value", "session").agg(
        F.min(time).alias("first_ns"),
        F.max(time).alias("last_ns"),
        F.count("*").alias("events"),
        F.sort_array(F.collect_set("key")).alias("keys"),
    )
    return found.select(
        "value",
        F.when(value.isNotNull(), F.col("session")).alias("session"),
        _time("first_ns").alias("start"),
        _time("last_ns").alias("end"),
        F.expr("(last_ns - first_ns) div 1000000").alias("duration_ms"),
        "events",
        "keys",
    ).orderBy("value", "session")


def _parse(by: str) -> tuple[str, str]:
    kind, _, name = by.partition(":")
    if kind == "header" and name:
        return "headers", name
    if kind == "payload" and _FIELD.fullmatch(name):
        return "payload", name
    raise ConfigInvalid("by", f"{by!r} is neither header:NAME nor payload:FIELD, such as payload:user.id")


def value_of(by: str) -> Column:
    """Return the value of the field, or null if an event does not have it."""
    column, name = _parse(by)
    if column == "headers":
        return F.col("headers")[F.lit(name)]
    path = "".join(f"['{each}']" for each in name.split("."))
    return F.get_json_object(F.col("payload").cast("string"), f"${path}")


def _time(name: str) -> Column:
    return F.timestamp_micros(F.expr(f"{name} div 1000"))
