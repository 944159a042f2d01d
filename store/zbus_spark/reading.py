"""The whole history of a log as one DataFrame: offloaded events from Parquet files, the others from the log.

The log is read from the offset after the end of the cold tier's manifest, so no event is read twice or skipped at any
stage of an offload: offloaded and still in the log, partly trimmed, or trimmed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias
from pyspark.sql.types import StructType

from zbus.errors import ConfigInvalid, LogTrimmed
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus_log.cold.merge import may_match
from zbus_log.cold.tier import Cold, check_holds
from zbus_log.file.database import log_errors
from zbus_log.file.manifest import NAME, ColdDamaged, Manifest, Segment, load
from zbus_log.file.tables import get_state, origin_of
from zbus_log.read.reader import readable

from .columns import HEADER, PAYLOAD_BYTES, RAW, SCHEMA, schema_of
from .failures import spark_errors
from .offsets import before, following
from .options import ReadOptions
from .partitions import ends_before

Position = int | datetime | str

KEYS_LISTED_MAX = 1000  # more keys are matched by a join instead of a list
_NO_FILES = ("seg", "date", "ns", "namespace", "component", "topic", "published_at")  # not stored in the files
FILED = StructType([field for field in RAW.fields if field.name not in _NO_FILES])


def read(
    spark: SparkSession,
    log: str | Path,
    *,
    key: str | Iterable[str] | None = None,
    start: Position | None = None,
    end: Position | None = None,
    cold: str | Path | None = None,
    columns: Sequence[str] | None = None,
    **options: Any,
) -> DataFrame:
    """Return the events of a log, including offloaded ones, with the columns of `format("zbus")`.

    `log` is a file, or a URL such as `zenoh://host:port`. `key` is one or several key expressions; the default is all
    keys. `start` and `end` are offsets or times (a datetime or ISO text), both included. `cold` is the folder of the
    cold tier, by default `<log>-cold`; for a URL it is read only if it is named. `columns` limits the columns that are
    built. `options` are the options of the source.

    Raises `LogTrimmed` if a part of the range is neither in the log nor in the cold tier.
    """
    chosen = _parse_options(log, key, start, end, options)
    every = RAW if chosen.raw else SCHEMA
    schema = every if columns is None else schema_of(columns, chosen.raw)
    folder = _folder(chosen, cold)
    manifest = _load_manifest(spark, folder)
    chosen, origin, low_water, offloaded_until = _identify(chosen)
    if (
        max(low_water, offloaded_until) > manifest.last
    ):  # trimmed since the manifest was read, or never offloaded: read it again
        manifest = _load_manifest(spark, folder)
    if manifest.epoch and origin_of(bytes.fromhex(manifest.epoch)) != origin:
        reason = f"the tier belongs to another log than {origin:x}, or that log began a new epoch after a loss"
        raise ColdDamaged(f"{folder}/{NAME}", reason, advice="Name the folder of this log's own tier")
    check_holds(manifest, folder, offloaded_until)
    span, fail = chosen.span, chosen.fail_on_data_loss
    segments = [segment for segment in manifest.segments if _overlaps(segment, span)]
    explicit_start = bool(chosen.start_offset)  # otherwise read from the first event that is left
    gone = before(manifest.first) if span.after < manifest.last else low_water
    if fail and span.after < gone and (explicit_start or _ends_before(chosen, manifest, gone)):
        raise LogTrimmed(span.after, gone)
    rest = span.until is None or span.until > manifest.last
    if segments and rest and fail and low_water > manifest.last:
        raise LogTrimmed(manifest.last, low_water)
    if not segments:
        after = max(span.after, manifest.last) if explicit_start or low_water <= manifest.last else low_water
        return _hot(spark, chosen, schema, after)
    with spark_errors():
        frame = _cold(spark, folder, segments, chosen, schema)
    return frame.unionByName(_hot(spark, chosen, schema, max(span.after, manifest.last))) if rest else frame


def derived(frame: DataFrame, schema: StructType) -> DataFrame:
    """Return rows of the tier's files with the columns of a log, like those of the source."""
    segments = F.split("key", "/", -1)
    made = {
        "namespace": F.substring_index("key", "/", 1),
        "component": F.when(F.size(segments) > 2, segments[1]),
        "topic": F.substring_index("key", "/", -1),
        "published_at": F.expr("timestamp_micros(published_ns div 1000)"),
        PAYLOAD_BYTES: F.octet_length("payload").cast("long"),
    }
    for name in schema.names:
        if name.startswith(HEADER):
            made[name] = F.col("headers")[F.lit(name.removeprefix(HEADER))]
    return frame.select(*[made[name].alias(name) if name in made else F.col(name) for name in schema.names])


def files(spark: SparkSession, folder: str, paths: Iterable[str]) -> DataFrame:
    """Return the rows of some Parquet files of a tier. Other files in the folder are ignored."""
    reader = spark.read.schema(FILED).options(**{"parquet.page.verify-checksum.enabled": "true"})
    # Take paths literally, even if they contain characters of a glob pattern.
    reader = reader.option("basePath", folder).option("__globPaths__", "false")
    return reader.parquet(*[f"{folder}/{path}" for path in paths])


def _parse_options(
    log: str | Path,
    key: str | Iterable[str] | None,
    start: Position | None,
    end: Position | None,
    given: dict[str, Any],
) -> ReadOptions:
    options = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
    if key is not None:
        expressions = [key] if isinstance(key, str) else list(key)
        options["key"] = " ".join(KeySet(expressions).expressions)
    for position, offset, time in ((start, "startOffset", "from"), (end, "endOffset", "to")):
        if isinstance(position, int):
            options[offset] = str(position)
        elif position is not None:
            options[time] = position if isinstance(position, str) else _utc(position).isoformat()
    return ReadOptions.parse({**options, "path": str(log)})


def _utc(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _folder(options: ReadOptions, cold: str | Path | None) -> str:
    """Return the tier's folder as a URI for Spark, or an empty text if no tier is read. Hadoop does not decode it."""
    if cold is None:
        if options.remote:
            return ""
        cold = f"{options.path}-cold"
    if "://" in str(cold) and not str(cold).startswith("file:"):
        return str(cold).rstrip("/")
    path = unquote(urlsplit(str(cold)).path) if str(cold).startswith("file:") else str(cold)
    return f"file://{Path(path).absolute()}"


def _load_manifest(spark: SparkSession, folder: str) -> Manifest:
    """Return the current manifest, from any file system that Spark can read."""
    if not folder:
        return Manifest()
    if folder.startswith("file://"):
        return Cold(folder.removeprefix("file://")).manifest()
    try:
        found = spark.read.format("binaryFile").load(f"{folder}/{NAME}").select("content").collect()
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            raise ConfigInvalid("cold", f"there is no cold tier {folder!r}") from error
        raise
    return load(Path(folder) / NAME, bytes(found[0].content))


def _identify(options: ReadOptions) -> tuple[ReadOptions, int, int, int]:
    """Return the options with the log's origin if it is remote, the origin, the low-water mark, and the last offset
    that a local log has moved to its tier.
    """
    if options.remote:
        from .remote import RemoteLog  # imported here, because most reads need no transport

        with RemoteLog(options.path, options.origin, options.timeout_s) as log:
            origin, _, low_water = log.describe()
        return options.model_copy(update={"origin": origin}), origin, low_water, 0
    engine = readable(options.path)
    try:
        with log_errors(options.path), engine.connect() as connection:
            state = get_state(connection)
            return options, origin_of(state.epoch), state.low_water, state.offloaded_until
    finally:
        engine.dispose()


def _overlaps(segment: Segment, span: Span) -> bool:
    """Return whether a segment may have events of a span."""
    if segment.last <= span.after or (span.until is not None and segment.first > span.until) or not segment.files:
        return False
    after = span.from_ns is None or segment.published_max >= span.from_ns
    return after and (span.to_ns is None or segment.published_min <= span.to_ns)


def _ends_before(options: ReadOptions, manifest: Manifest, gone: int) -> bool:
    """Return whether the requested end lies before all events that are left, in the tier or in the log."""
    begun = [segment.published_min for segment in manifest.segments if segment.files]
    if begun and options.end_offset is None and options.to_ns is not None:
        return min(begun) > options.to_ns
    return ends_before(options, gone)


def _hot(spark: SparkSession, options: ReadOptions, schema: StructType, after: int) -> DataFrame:
    given = options.model_dump(by_alias=True, exclude_unset=True, exclude={"path", "key", "origin", "start_offset"})
    given |= {"startOffset": following(after)} | ({"key": " ".join(options.key)} if options.key else {})
    given |= {"origin": f"{options.origin:x}"} if options.origin is not None else {}
    if options.end_offset is not None:
        given["endOffset"] = max(options.end_offset, after)
    with spark_errors():
        return spark.read.format("zbus").schema(schema).options(**given).load(options.path)


def _cold(
    spark: SparkSession, folder: str, segments: list[Segment], options: ReadOptions, schema: StructType
) -> DataFrame:
    keys, span = options.keys, options.span
    chosen = [file for segment in segments for file in segment.files if may_match(file.path, keys)]
    within = [file for file in chosen if file.last > span.after and (span.until is None or file.first <= span.until)]
    if not within:
        return spark.createDataFrame([], schema)
    frame = _of_keys(spark, files(spark, folder, [file.path for file in within]), keys)
    if span.after:
        frame = frame.where(F.col("offset") > span.after)
    if span.until is not None:
        frame = frame.where(F.col("offset") <= span.until)
    if span.from_ns is not None:
        frame = frame.where(F.col("published_ns") >= span.from_ns)
    if span.to_ns is not None:
        frame = frame.where(F.col("published_ns") <= span.to_ns)
    return derived(frame, schema)


def _of_keys(spark: SparkSession, frame: DataFrame, keys: KeySet) -> DataFrame:
    """Return the rows of some keys. zbus itself matches each key against the expressions; Spark gets the result."""
    if keys.unfiltered:
        return frame
    if any("*" in expression for expression in keys.expressions):
        names = [name for (name,) in frame.select("key").distinct().collect() if name in keys]
    else:
        names = list(keys.expressions)
    if len(names) <= KEYS_LISTED_MAX:
        return frame.where(F.col("key").isin(names))
    listed = spark.createDataFrame([(name,) for name in names], "key string")
    return frame.join(F.broadcast(listed), "key", "left_semi")
