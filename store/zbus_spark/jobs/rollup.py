"""Rollup: events, bytes, rate and latency of each key in each time window.

A log stores the time when an event was published, not when it was received. So the end-to-end latency is the time from
the header `sent-at-ns` (Unix nanoseconds that the producer sets, such as when a sensor was read or a request arrived)
to publishing. If a bridge or a service publishes on behalf of others, that is the whole path of the event to the bus.
An event without the header has no latency.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from zbus_spark.columns import HEADER, PAYLOAD_BYTES

from .durations import milliseconds

LATENCY_HEADER = "sent-at-ns"
ACCURACY = 10_000  # percentiles are exact up to half as many events in a window, and their rank within 0.01 % beyond


def columns(latency_header: str = LATENCY_HEADER) -> tuple[str, ...]:
    """Return the columns that a rollup needs: only the size of payloads, and only one header."""
    return "key", "published_at", "published_ns", PAYLOAD_BYTES, f"{HEADER}{latency_header}"


def rollup(
    df: DataFrame, window: str = "1 minute", latency_header: str = LATENCY_HEADER, watermark: str | None = None
) -> DataFrame:
    """Return the events, bytes, events per second and latency percentiles in µs of each key and window.

    `measured` is the number of events with a latency. A stream needs a `watermark`: how late an event may be and still
    be counted. A window is emitted once the watermark has passed. `df` has the columns of a log, or those that
    `columns()` returns, which take less time to read.
    """
    span_ms = milliseconds("window", window)
    events = measures(df, latency_header)
    if watermark is not None:
        events = events.withWatermark("published_at", f"{milliseconds('watermark', watermark)} milliseconds")
    of_window = F.window("published_at", f"{span_ms} milliseconds").alias("window")
    counted = events.groupBy("key", of_window).agg(
        F.count("*").alias("events"),
        F.sum("bytes").alias("bytes"),
        F.count("latency_us").alias("measured"),
        F.percentile_approx("latency_us", [0.5, 0.99], ACCURACY).alias("latency"),
    )
    return counted.select(
        F.col("window.start").alias("start"),
        F.col("window.end").alias("end"),
        "key",
        "events",
        "bytes",
        (F.col("events") * 1000.0 / span_ms).alias("rate"),
        F.col("latency")[0].alias("latency_us_p50"),
        F.col("latency")[1].alias("latency_us_p99"),
        "measured",
    )


def measures(df: DataFrame, latency_header: str = LATENCY_HEADER) -> DataFrame:
    """Return the key, time, size and latency of each event."""
    return df.select(
        "key",
        "published_at",
        (F.col(PAYLOAD_BYTES) if PAYLOAD_BYTES in df.columns else F.octet_length("payload").cast("long")).alias(
            "bytes"
        ),
        _latency_us(_header(df, latency_header)).alias("latency_us"),
    )


def totals(rolled: DataFrame) -> DataFrame:
    """Return the totals of each key over all windows of a rollup, and its maxima. Keys with most events come first."""
    summed = rolled.groupBy("key").agg(
        F.sum("events").alias("events"),
        F.sum("bytes").alias("bytes"),
        F.count("*").alias("windows"),
        F.max("rate").alias("rate_max"),
        F.max("latency_us_p50").alias("latency_us_p50_max"),
        F.max("latency_us_p99").alias("latency_us_p99_max"),
    )
    return summed.orderBy(F.desc("events"), "key")


def _header(df: DataFrame, name: str) -> Column:
    alone = f"{HEADER}{name}"
    return df[f"`{alone.replace('`', '``')}`"] if alone in df.columns else F.col("headers")[F.lit(name)]


def _latency_us(header: Column) -> Column:
    """Return the latency, or null if the header is not a number or is out of range: producers may write any text."""
    sent_ns = header.try_cast("bigint")
    taken_ns = F.try_subtract(F.col("published_ns"), sent_ns)
    return F.when(taken_ns.isNotNull(), F.call_function("div", taken_ns, F.lit(1000)))
