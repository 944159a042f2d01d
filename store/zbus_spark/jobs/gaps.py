"""Missing, late and duplicate events of each publisher, found by their sequences, which start at 0 and rise by 1."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from zbus.util.renamed import renamed_arguments

COLUMNS = ("offset", "publisher_id", "sequence")
MISSING = ("before_first", "between", "after_last")  # the findings that mean a loss
_FINDING = "struct<finding string, first_sequence bigint, last_sequence bigint, events bigint>"


@renamed_arguments(heard="announced")
def gaps(df: DataFrame, announced: Mapping[int, int] | None = None, low_water: int = 0) -> DataFrame:
    """Return one row for each finding: publisher_id, finding, first_sequence, last_sequence, events.

    `before_first`, `between` and `after_last` are ranges of missing sequences; events after the last one are known
    to be missing only up to `announced`, the highest sequence that each publisher announced. `trimmed` is the range
    before the first event in a log from which everything up to the offset `low_water` was removed: it is unknown
    whether the log had these events. `late` are events stored after a later one, and `duplicate` are events stored
    again; their range is from the lowest to the highest sequence. A publisher without findings has no row.
    """
    by_sequence = Window.partitionBy("publisher_id").orderBy("sequence", "offset")
    before = Window.partitionBy("publisher_id").orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    sequence, previous = F.col("sequence"), F.col("previous")
    marked = (
        df.select(*COLUMNS)
        .withColumn("previous", F.lag("sequence").over(by_sequence))
        .withColumn("again", F.coalesce(previous == sequence, F.lit(False)))
        .withColumn("late", ~F.col("again") & F.coalesce(F.max("sequence").over(before) > sequence, F.lit(False)))
    )
    # Collect only the findings of a publisher, in the same pass and without another shuffle.
    summed = marked.groupBy("publisher_id").agg(
        F.min("sequence").alias("first"),
        F.max("sequence").alias("last"),
        F.collect_list(F.when(sequence - previous > 1, _finding(F.lit("between"), previous + 1, sequence - 1))).alias(
            "between"
        ),
        *(
            _finding(F.lit(name), F.min(found), F.max(found), F.count(found)).alias(name)
            for name, found in (
                ("late", F.when(F.col("late"), sequence)),
                ("duplicate", F.when(F.col("again"), sequence)),
            )
        ),
    )
    known = df.sparkSession.createDataFrame(list((announced or {}).items()), "publisher_id long, highest long")
    last = F.coalesce("last", F.lit(-1))
    unseen = F.when(F.col("last").isNull() & (F.lit(low_water) > 0), "trimmed").otherwise("after_last")
    found = F.concat(
        F.array(_finding(F.lit("trimmed" if low_water else "before_first"), F.lit(0), F.col("first") - 1)),
        F.coalesce("between", F.array().cast(f"array<{_FINDING}>")),
        F.array(_finding(unseen, F.try_add(last, F.lit(1)), F.col("highest")), F.col("late"), F.col("duplicate")),
    )
    listed = summed.join(F.broadcast(known), "publisher_id", "full" if announced else "left")
    rows = listed.select("publisher_id", F.explode(found).alias("found")).select("publisher_id", "found.*")
    return rows.where("events > 0").orderBy("publisher_id", "first_sequence", "finding")


def _finding(name: Column, first: Column, last: Column, events: Column | None = None) -> Column:
    count = last - first + 1 if events is None else events
    return F.struct(name, first.cast("long"), last.cast("long"), count.cast("long")).cast(_FINDING)
