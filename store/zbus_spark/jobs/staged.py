"""Staged segments of the cold tier: written beside it, read back and compared, and only then moved in.

The comparison covers the number of events that SQLite counts, the bounds, each event's own checksum, and a digest of
all values that does not depend on their order: computed while the events are written, and again from the files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from zbus.errors import EventCorrupt, LogError
from zbus.util.atomic_file import sync
from zbus_log.cold.merge import COLUMNS
from zbus_log.cold.tier import ColdPage
from zbus_log.file.manifest import ColdFile, Segment
from zbus_spark.offsets import length
from zbus_spark.reading import FILED, files

from .sealed_segments import SealedRange

PARTITION_EVENTS_MIN = 65_536
NAMESPACE_BYTES_MAX = 80  # percent-encoding triples it at most, which still fits into the name of a folder
_DAY_NS = 86_400_000_000_000
_DATE = f"date_from_unix_date(int((published_ns - pmod(published_ns, {_DAY_NS})) div {_DAY_NS}))"


class Digest(NamedTuple):
    """The number of events and the sum of their hashes."""

    events: int
    digest: int


def write(spark: SparkSession, log: str, segments: Sequence[SealedRange], staging: Path) -> Digest:
    """Write sealed segments as Parquet under `staging`. Returns the digest of the events as they were read."""
    first, last = segments[0].first, segments[-1].last
    share = -(-length(first, last) // spark.sparkContext.defaultParallelism)
    rows = max(PARTITION_EVENTS_MIN, min(share, max(length(each.first, each.last) for each in segments)))
    options = {"raw": True, "startOffset": first, "endOffset": last, "rowsPerPartition": rows}
    found = spark.read.format("zbus").schema(FILED).options(**options).load(log)
    segment = F.lit(segments[-1].name)
    for each in reversed(segments[:-1]):
        segment = F.when(F.col("offset") <= each.last, F.lit(each.name)).otherwise(segment)
    namespace = F.substring_index("key", "/", 1)
    seen = Observation()
    placed = (
        found.withColumn("hash", _hash())
        .observe(seen, F.count("*").alias("events"), F.sum("hash").alias("digest"))
        .drop("hash")
        .withColumn("seg", segment)
        .withColumn("date", F.expr(_DATE))
        .withColumn("ns", F.when(F.octet_length(namespace) <= NAMESPACE_BYTES_MAX, namespace))
    )
    by = ("seg", "date", "ns")
    ordered = placed.sortWithinPartitions(*by, "offset")
    ordered.write.partitionBy(*by).option("compression", "zstd").parquet(f"file://{staging}")
    return Digest(seen.get["events"], int(seen.get["digest"] or 0))


def verify(spark: SparkSession, segments: Sequence[SealedRange], staging: Path, written: Digest) -> list[Segment]:
    """Read all files back and compare them. Returns the entries for the manifest; raises `LogError` if they differ."""
    paths = {each.name: sorted(_parquet(staging / f"seg={each.name}")) for each in segments}
    listed = [path.relative_to(staging).as_posix() for found in paths.values() for path in found]
    summaries: dict[str, Any] = {}
    if listed:
        stored = files(spark, f"file://{staging}", listed)
        summaries = {row.seg: row for row in _summaries(stored)}
        _check_events(stored)
    digest = Digest(sum(row.events for row in summaries.values()), sum(int(row.digest) for row in summaries.values()))
    if digest != written:
        reason = f"the files have {digest.events} events instead of {written.events}, or their values differ"
        raise LogError(f"{reason}. {_NOTHING}")
    return [_segment(staging, each, paths[each.name], summaries.get(each.name)) for each in segments]


def move_into_tier(folder: Path, staging: Path, sealed: SealedRange) -> None:
    """Move a verified segment into the tier and sync it. The manifest does not name it yet."""
    staged, target = staging / f"seg={sealed.name}", folder / f"seg={sealed.name}"
    if not staged.is_dir():
        return  # the segment has no events
    for path in staged.rglob("*"):
        if path.is_file() and path.suffix != ".parquet":
            path.unlink()  # a checksum file of Hadoop: Parquet pages have their own checksums
        else:
            sync(path)
    sync(staged)
    if target.exists():
        shutil.rmtree(target)
    staged.rename(target)
    sync(folder)


_NOTHING = "Nothing was offloaded, and the log is unchanged"


def _hash() -> Column:
    """Return a hash of all values of an event. A map has no hash, so its entries are used."""
    values = [F.map_entries(field.name) if field.name == "headers" else F.col(field.name) for field in FILED.fields]
    return F.xxhash64(*values).cast("decimal(20,0)")


def _summaries(stored: DataFrame) -> list[Any]:
    return (
        stored.withColumn("hash", _hash())
        .groupBy("seg")
        .agg(
            F.count("*").alias("events"),
            F.sum("hash").alias("digest"),
            F.min("offset").alias("first"),
            F.max("offset").alias("last"),
            F.sum(F.col("offset").cast("decimal(20,0)")).alias("offsets"),
            F.min("published_ns").alias("published_min"),
            F.max("published_ns").alias("published_max"),
        )
        .collect()
    )


def _check_events(stored: DataFrame) -> None:
    """Compare each event with its checksum from the log, as every reader of the tier does."""
    bad = stored.select(*COLUMNS).mapInArrow(_corrupt, "offset long").agg(F.min("offset")).collect()[0][0]
    if bad is not None:
        error = EventCorrupt(bad, "its checksum does not match")
        error.add_note(f"{_NOTHING}; `zbus log verify` checks whether it is corrupt in the log")
        raise error


def _corrupt(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        _, error, _ = ColdPage([batch], 0, 0).events()
        if isinstance(error, EventCorrupt):
            yield pa.RecordBatch.from_pydict({"offset": pa.array([error.offset], pa.int64())})


def _segment(staging: Path, sealed: SealedRange, paths: list[Path], row: Any) -> Segment:
    found = [_file(staging, path) for path in paths]
    events, offsets = (row.events, int(row.offsets) - row.events * sealed.first) if row is not None else (0, 0)
    within = row is None or sealed.first <= row.first <= row.last <= sealed.last
    counted = sum(file.events for file in found)
    if not within or (events, offsets, counted) != (sealed.events, sealed.offsets, sealed.events):
        range_ = f"from {sealed.first} to {sealed.last}"
        raise LogError(f"the log has {sealed.events} events {range_}, but those in the files differ. {_NOTHING}")
    return Segment(
        first=sealed.first,
        last=sealed.last,
        events=sealed.events,
        digest=f"xxhash64:{0 if row is None else row.digest}",
        published_min=0 if row is None else row.published_min,
        published_max=0 if row is None else row.published_max,
        bytes=sum(path.stat().st_size for path in paths),
        files=tuple(found),
    )


def _file(staging: Path, path: Path) -> ColdFile:
    """Return the entry of a file for the manifest, from its footer."""
    metadata = pq.read_metadata(path)
    at = metadata.schema.names.index("offset")
    groups = [metadata.row_group(number).column(at).statistics for number in range(metadata.num_row_groups)]
    bounds = min(group.min for group in groups), max(group.max for group in groups)
    return ColdFile(path.relative_to(staging).as_posix(), metadata.num_rows, *bounds)


def _parquet(folder: Path) -> Iterator[Path]:
    return folder.rglob("*.parquet")
