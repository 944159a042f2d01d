"""Missing, late and duplicate events of each publisher, found by their sequences, which start at 0 and rise by 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from zbus.util.renamed import renamed_arguments
from zbus_log.file.removed import gaps_between
from zbus_spark.removed_events import RemovedEvents

COLUMNS = ("offset", "publisher_id", "sequence")
MISSING = ("before_first", "between", "after_last")  # the findings that mean a loss
_RANGE = "finding string, first_sequence bigint, last_sequence bigint, events bigint"
_FINDING = f"struct<{_RANGE}, after bigint, before bigint>"  # `after` and `before`: the offsets of the events around


class _Range(NamedTuple):
    """Some sequences of a publisher: the row of a finding."""

    finding: str
    first: int
    last: int
    events: int


@renamed_arguments(heard="announced")
def gaps(
    df: DataFrame,
    announced: Mapping[int, int] | None = None,
    low_water: int = 0,
    removed: Callable[[], RemovedEvents] | None = None,
) -> DataFrame:
    """Return one row for each finding: publisher_id, finding, first_sequence, last_sequence, events.

    `before_first`, `between` and `after_last` are ranges of missing sequences; events after the last one are known
    to be missing only up to `announced`, the highest sequence that each publisher announced. `trimmed` is the range
    before the first event in a log from which everything up to the offset `low_water` was removed: it is unknown
    whether the log had these events. `late` are events stored after a later one, and `duplicate` are events stored
    again; their range is from the lowest to the highest sequence. A publisher without findings has no row.

    `removed` tells which events the log has removed, such as `lambda: removed_events("app.db")`. Ranges of them are
    `removed` instead of missing. Other missing sequences are `maybe_removed` if the log has removed at least as many
    other events between the two around them: it does not know any more whether they were these. With `removed`, the
    events are read when this function is called, and `removed` is called afterwards.
    """
    ranges = _ranges(df, announced or {}, low_water)
    if removed is not None:
        ranges = _without_removed(ranges.localCheckpoint(), removed())
    found = ranges.select("publisher_id", "finding", "first_sequence", "last_sequence", "events")
    return found.orderBy("publisher_id", "first_sequence", "finding")


def _without_removed(ranges: DataFrame, removed: RemovedEvents) -> DataFrame:
    """Return the ranges with those of missing sequences split into what was removed and the rest."""

    def split(publisher: int, found: Row) -> list[_Range]:
        return split_range(removed, publisher, _Range(*found[:4]), found["after"], found["before"])

    columns = F.struct("finding", "first_sequence", "last_sequence", "events", "after", "before")
    rest = F.udf(split, f"array<struct<{_RANGE}>>", useArrow=False)("publisher_id", columns)
    return ranges.select("publisher_id", F.explode(rest).alias("found")).select("publisher_id", "found.*")


def split_range(
    removed: RemovedEvents, publisher: int, found: _Range, after: int | None, before: int | None
) -> list[_Range]:
    """Split a range of missing sequences, between events at two offsets, into what was removed and the rest.

    >>> removed = RemovedEvents({7: [(4, 5)]}, [(21, 23, 3)])
    >>> [tuple(each) for each in split_range(removed, 7, _Range("between", 3, 5, 3), 20, 30)]
    [('removed', 4, 5, 2), ('maybe_removed', 3, 3, 1)]
    >>> [tuple(each) for each in split_range(removed, 7, _Range("between", 2, 5, 4), 20, 30)]
    [('removed', 4, 5, 2), ('between', 2, 3, 2)]
    """
    if found.finding not in MISSING:
        return [found]
    known = [_Range("removed", first, last, last - first + 1) for first, last in removed.of(publisher, *found[1:3])]
    rest = gaps_between(found.first - 1, (), found.last, [each[1:3] for each in known])
    name = "maybe_removed" if found.events <= removed.between(after or 0, before) else found.finding
    return [*known, *(_Range(name, first, last, last - first + 1) for first, last in rest)]


def _ranges(df: DataFrame, announced: Mapping[int, int], low_water: int) -> DataFrame:
    """Return the findings as `gaps` does, and for missing ones the offsets of the events around them."""
    by_sequence = Window.partitionBy("publisher_id").orderBy("sequence", "offset")
    earlier = Window.partitionBy("publisher_id").orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    sequence, previous, offset, previous_at = (F.col(n) for n in ("sequence", "previous", "offset", "previous_at"))
    marked = (
        df.select(*COLUMNS)
        .withColumn("previous", F.lag("sequence").over(by_sequence))
        .withColumn("previous_at", F.lag("offset").over(by_sequence))
        .withColumn("again", F.coalesce(previous == sequence, F.lit(False)))
        .withColumn("late", ~F.col("again") & F.coalesce(F.max("sequence").over(earlier) > sequence, F.lit(False)))
    )
    around = F.least(previous_at, offset), F.greatest(previous_at, offset)
    between = _finding(F.lit("between"), previous + 1, sequence - 1, around=around)
    # Collect only the findings of a publisher, in the same pass and without another shuffle.
    summed = marked.groupBy("publisher_id").agg(
        F.min("sequence").alias("first"),
        F.min_by("offset", "sequence").alias("first_at"),
        F.max("sequence").alias("last"),
        F.max_by("offset", "sequence").alias("last_at"),
        F.collect_list(F.when(sequence - previous > 1, between)).alias("between"),
        *(
            _finding(F.lit(name), F.min(found), F.max(found), F.count(found)).alias(name)
            for name, found in (
                ("late", F.when(F.col("late"), sequence)),
                ("duplicate", F.when(F.col("again"), sequence)),
            )
        ),
    )
    known = df.sparkSession.createDataFrame(list(announced.items()), "publisher_id long, highest long")
    last = F.coalesce("last", F.lit(-1))
    unseen = F.when(F.col("last").isNull() & (F.lit(low_water) > 0), "trimmed").otherwise("after_last")
    nothing = F.lit(None)
    found = F.concat(
        F.array(
            _finding(
                F.lit("trimmed" if low_water else "before_first"),
                F.lit(0),
                F.col("first") - 1,
                around=(nothing, F.col("first_at")),
            )
        ),
        F.coalesce("between", F.array().cast(f"array<{_FINDING}>")),
        F.array(
            _finding(unseen, F.try_add(last, F.lit(1)), F.col("highest"), around=(F.col("last_at"), nothing)),
            F.col("late"),
            F.col("duplicate"),
        ),
    )
    listed = summed.join(F.broadcast(known), "publisher_id", "full" if announced else "left")
    rows = listed.select("publisher_id", F.explode(found).alias("found")).select("publisher_id", "found.*")
    return rows.where("events > 0")


def _finding(
    name: Column, first: Column, last: Column, events: Column | None = None, around: tuple[Column, Column] | None = None
) -> Column:
    count = last - first + 1 if events is None else events
    after, before = (F.lit(None), F.lit(None)) if around is None else around
    numbers = (each.cast("long") for each in (first, last, count, after, before))
    return F.struct(name, *numbers).cast(_FINDING)
