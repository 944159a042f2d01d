"""What happened on each key in each window of time: events, bytes, rate, and how long events took.

A log holds when an event was published, and not when it was received. So its end-to-end latency is what its
producer tells: the header `sent-at-ns` (Unix nanoseconds at the moment that counts, such as when a sensor was read or
a request came in), up to the moment of publishing. Where a bridge or a service publishes on behalf of others, that
is the whole way of the event to the bus. Without the header there is no latency, rather than a made-up one.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from zbus_spark.columns import HEADER, PAYLOAD_BYTES

from .durations import milliseconds

LATENCY_HEADER = "sent-at-ns"
ACCURACY = 10_000  # the rank of a percentile is exact up to half as many events in a window, and within 0.01 % beyond


def columns(latency_header: str = LATENCY_HEADER) -> tuple[str, ...]:
    """What must be read of a log to roll it up, and no more: of payloads their size, of headers the one."""
    return "key", "published_at", "published_ns", PAYLOAD_BYTES, f"{HEADER}{latency_header}"


def rollup(
    df: DataFrame, window: str = "1 minute", latency_header: str = LATENCY_HEADER, watermark: str | None = None
) -> DataFrame:
    """For each key and window: events, bytes, events a second, and the percentiles of the latency in µs.

    `measured` is how many events told their latency. A stream needs a `watermark`: how late an event may be and still
    be counted. A window is given out when that has passed. `df` has the columns of a log, or those that `columns()`
    names, which cost less to read.
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
    """Of each event its key, time, size and latency: all that a rollup needs."""
    return df.select(
        "key",
        "published_at",
        (F.col(PAYLOAD_BYTES) if PAYLOAD_BYTES in df.columns else F.octet_length("payload").cast("long")).alias(
            "bytes"
        ),
        _latency_us(_header(df, latency_header)).alias("latency_us"),
    )


def totals(rolled: DataFrame) -> DataFrame:
    """For each key what all windows of a rollup add up to, and its busiest and slowest window; busiest keys first."""
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
    """Anybody may write anything into a header: what is no number, or out of all bounds, is no latency."""
    sent_ns = header.try_cast("bigint")
    taken_ns = F.try_subtract(F.col("published_ns"), sent_ns)
    return F.when(taken_ns.isNotNull(), F.call_function("div", taken_ns, F.lit(1000)))
