"""Functions as users write them for a backfill: good ones, and wrong ones."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def _upper(payload):  # type: ignore[no-untyped-def]  # Spark would take hints of bytes for a kind of its own
    return bytes(payload).upper()


_shout = F.udf(_upper, "binary")


def shout(events: DataFrame) -> DataFrame:
    return events.select(F.concat(F.lit("loud/"), "key").alias("key"), _shout("payload").alias("payload"), "headers")


def echo(events: DataFrame) -> DataFrame:
    return events.select("key", "payload")


def too_many(events: DataFrame) -> DataFrame:
    return events


def too_few(events: DataFrame) -> DataFrame:
    return events.select("payload")


def none(events: DataFrame) -> None:
    return None


number = 5
