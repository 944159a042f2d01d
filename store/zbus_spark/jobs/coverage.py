"""Comparison of two logs by the identity of their events: first by digests, then by rows of buckets that differ.

Both logs are split into buckets by publisher and sequence. The number of events and a sum of their hashes are compared
for each bucket, so equal logs are each read only once, and events of equal buckets are never compared. The hash
detects accidental differences; it does not protect against forged events.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from zbus_spark.removed_events import RemovedEvents

COLUMNS = ("offset", "publisher_id", "sequence", "key", "payload")
PUBLISHER_BUCKETS = 1024
SEQUENCES_A_BUCKET = 1000
_BUCKET = "bucket int, chunk long"
_IDENTITY = ["publisher_id", "sequence"]
DIFFERENCES = ("left_only", "right_only", "differs")  # the findings that mean a difference


def coverage(
    left: DataFrame,
    right: DataFrame,
    removed_left: Callable[[], RemovedEvents] | None = None,
    removed_right: Callable[[], RemovedEvents] | None = None,
) -> DataFrame:
    """Return one row for each event that differs: publisher_id, sequence, finding, offsets and keys.

    `finding` is `left_only`, `right_only`, or `differs` if the key or the payload differs. Digests are compared when
    this function is called, rows when its result is used.

    `removed_left` and `removed_right` tell which events each log has removed, such as
    `lambda: removed_events("app.db")`. An event that only the right log has is then `removed_left` if the left log has
    removed it, and the other way round. Rows are compared before they are called, and so when this function is called.
    """
    buckets = left.sparkSession.createDataFrame(differing(left, right), _BUCKET)
    ours, theirs = (_suspects(side, buckets, name) for side, name in ((left, "left"), (right, "right")))
    found = (
        F.when(F.col("right_offset").isNull(), "left_only")
        .when(F.col("left_offset").isNull(), "right_only")
        .when(F.col("left_hash") != F.col("right_hash"), "differs")
    )
    both = ours.join(theirs, _IDENTITY, "full").withColumn("finding", found).where("finding IS NOT NULL")
    shown = both.select(*_IDENTITY, "finding", "left_offset", "right_offset", "left_key", "right_key")
    if removed_left is not None or removed_right is not None:
        shown = shown.localCheckpoint()
        for only, name, removed in (
            ("right_only", "removed_left", removed_left),
            ("left_only", "removed_right", removed_right),
        ):
            if removed is not None:
                is_removed = (F.col("finding") == only) & _is_removed(removed())
                shown = shown.withColumn("finding", F.when(is_removed, name).otherwise(F.col("finding")))
    return shown.orderBy(*_IDENTITY)


def _is_removed(removed: RemovedEvents) -> Column:
    """Return whether the log knows that it removed the event of a row."""
    return F.udf(removed.has, "boolean", useArrow=False)(*_IDENTITY)


def differing(left: DataFrame, right: DataFrame) -> list[Row]:
    """Return the buckets that differ."""
    bucket = ["bucket", "chunk"]
    ours, theirs = _digests(left).alias("ours"), _digests(right).alias("theirs")
    joined = ours.join(theirs, bucket, "full")
    return joined.where(~F.col("ours.digest").eqNullSafe(F.col("theirs.digest"))).select(*bucket).collect()


def _digests(side: DataFrame) -> DataFrame:
    # Sums of half a hash cannot overflow and, unlike an exclusive or, they count duplicates.
    halves = (F.col("hash").bitwiseAND(0xFFFFFFFF), F.shiftrightunsigned("hash", 32))
    digest = F.struct(F.count("*"), *(F.sum(half) for half in halves))
    return _hashed(side).groupBy("bucket", "chunk").agg(digest.alias("digest"))


def _suspects(side: DataFrame, buckets: DataFrame, name: str) -> DataFrame:
    """Return the events of the buckets that differ, with one row for each identity."""
    rows = _hashed(side).join(F.broadcast(buckets), ["bucket", "chunk"], "left_semi")
    return rows.groupBy(*_IDENTITY).agg(
        F.min("offset").alias(f"{name}_offset"),
        F.min_by("key", "offset").alias(f"{name}_key"),
        F.min_by("hash", "offset").alias(f"{name}_hash"),
    )


def _hashed(side: DataFrame) -> DataFrame:
    return side.select(
        "offset",
        *_IDENTITY,
        "key",
        F.pmod(F.xxhash64("publisher_id"), F.lit(PUBLISHER_BUCKETS)).cast("int").alias("bucket"),
        F.expr(f"sequence div {SEQUENCES_A_BUCKET}").alias("chunk"),
        F.xxhash64(*_IDENTITY, "key", "payload").alias("hash"),
    )
