"""What one log has and another has not, by identity: digests first, and rows only where digests differ.

Both logs are cut into buckets by publisher and sequence. Of each bucket the number of events and a sum over
their hashes are compared, so that two logs that hold the same cost one pass over each, and no event of an equal
bucket is ever compared with another. The hash finds accidents; it is no proof against somebody who forges events.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

COLUMNS = ("offset", "publisher_id", "sequence", "key", "payload")
PUBLISHER_BUCKETS = 1024
SEQUENCES_A_BUCKET = 1000
_BUCKET = "bucket int, chunk long"
_IDENTITY = ["publisher_id", "sequence"]


def coverage(left: DataFrame, right: DataFrame) -> DataFrame:
    """One row for each event that is not the same in both: publisher_id, sequence, finding, offsets and keys.

    `finding` is `left_only`, `right_only`, or `differs` where the key or the payload is not the same. Digests are
    compared at once, when this is called; rows when the result is used.
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
    return shown.orderBy(*_IDENTITY)


def differing(left: DataFrame, right: DataFrame) -> list[Row]:
    """The buckets in which the two are not the same."""
    bucket = ["bucket", "chunk"]
    ours, theirs = _digests(left).alias("ours"), _digests(right).alias("theirs")
    joined = ours.join(theirs, bucket, "full")
    return joined.where(~F.col("ours.digest").eqNullSafe(F.col("theirs.digest"))).select(*bucket).collect()


def _digests(side: DataFrame) -> DataFrame:
    # Sums of half a hash cannot overflow, and unlike an exclusive or they do not lose what is there twice.
    halves = (F.col("hash").bitwiseAND(0xFFFFFFFF), F.shiftrightunsigned("hash", 32))
    digest = F.struct(F.count("*"), *(F.sum(half) for half in halves))
    return _hashed(side).groupBy("bucket", "chunk").agg(digest.alias("digest"))


def _suspects(side: DataFrame, buckets: DataFrame, name: str) -> DataFrame:
    """The events of buckets that differ, in one row for each identity."""
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
