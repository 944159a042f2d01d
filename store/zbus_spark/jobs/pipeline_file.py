"""A pipeline file: a source, steps in Spark SQL and a sink, checked before Spark starts.

    [source]
    log = "app.db"
    key = "shop/**"

    [[steps]]
    name = "orders"
    sql = "SELECT key, CAST(payload AS STRING) AS body FROM events"

    [[steps]]
    sql = "SELECT concat('copy/', key) AS key, body AS payload FROM orders"

    [sink]
    log = "copies.db"

The source is the view `events`. Each step is a view that later steps can use, and the last one goes to the sink. Paths
are relative to the file. Rows are published to a log exactly once: running the same file again publishes nothing. The
file is identified by its `id`, or without one by its name and content.
"""

from __future__ import annotations

import os
import tomllib
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pyspark.sql import DataFrame, SparkSession

from zbus.config import config_errors
from zbus.errors import ConfigInvalid, KeyInvalid
from zbus.keys import KeySet, check_key
from zbus_spark.commit import published
from zbus_spark.failures import spark_errors
from zbus_spark.options import OFFSET_MAX
from zbus_spark.reading import Position, read

from .atomic_parquet import parquet
from .named_writes import write

EVENTS = "events"
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"


def _expressions(value: Any) -> Any:
    try:
        return KeySet([value] if isinstance(value, str) else value).expressions
    except (KeyInvalid, TypeError) as error:
        raise ValueError(str(error)) from error


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PipelineSource(_StrictModel):
    """The input: a log and its cold tier, or with `stream` the log as it grows."""

    log: str = Field(min_length=1)
    key: Annotated[tuple[str, ...] | None, BeforeValidator(_expressions)] = None
    start: int | None = Field(None, ge=0, le=OFFSET_MAX)
    end: int | None = Field(None, ge=0, le=OFFSET_MAX)
    from_: datetime | None = Field(None, alias="from")
    to: datetime | None = None
    cold: str | None = Field(None, min_length=1)
    stream: bool = False
    until: Literal["stopped", "read"] = "stopped"  # a stream runs until it is stopped, or until it has read all events
    checkpoint: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> PipelineSource:
        for offset, time, names in ((self.start, self.from_, "start and from"), (self.end, self.to, "end and to")):
            if offset is not None and time is not None:
                raise ValueError(f"{names} exclude each other: give an offset or a time, not both")
        if self.stream and self.checkpoint is None:
            raise ValueError("a stream needs a checkpoint: the folder in which Spark stores its position")
        if self.stream and (self.end is not None or self.to is not None or self.cold is not None):
            raise ValueError("a stream reads only the log and has no end: end, to and cold need stream = false")
        if not self.stream and (self.checkpoint is not None or self.until != "stopped"):
            raise ValueError("checkpoint and until need stream = true")
        return self

    @property
    def first(self) -> Position | None:
        """The first offset or time to read."""
        return self.from_ if self.start is None else self.start

    @property
    def last(self) -> Position | None:
        """The last offset or time to read."""
        return self.to if self.end is None else self.end


class PipelineStep(_StrictModel):
    """One query over the views before it."""

    sql: str = Field(pattern=r"\S")
    name: str | None = Field(None, pattern=f"^{_NAME}$")


class PipelineSink(_StrictModel):
    """The output of the last step: one of `log`, `parquet` and `table`."""

    log: str | None = Field(None, min_length=1)
    key: str | None = None  # of all rows; without it, rows have a column `key`
    parquet: str | None = Field(None, min_length=1)
    replace: bool = False  # replace the Parquet folder if it exists
    table: bool = False  # print to stdout
    rows: int = Field(50, ge=1)

    @model_validator(mode="after")
    def _one(self) -> PipelineSink:
        if (self.log is not None) + (self.parquet is not None) + self.table != 1:
            raise ValueError("give one of: log, parquet, table = true")
        if self.key is not None:
            if self.log is None:
                raise ValueError("key needs a sink that is a log")
            try:
                check_key(self.key)
            except KeyInvalid as error:
                raise ValueError(str(error)) from error
        return self


class Pipeline(_StrictModel):
    """A pipeline: the content of a file."""

    id: str | None = Field(None, min_length=1, max_length=100)
    source: PipelineSource
    steps: tuple[PipelineStep, ...] = ()
    sink: PipelineSink

    @model_validator(mode="after")
    def _consistent(self) -> Pipeline:
        names = [EVENTS, *self.names]
        if twice := [name for at, name in enumerate(names) if name.lower() in map(str.lower, names[:at])]:
            raise ValueError(f"steps: two views are named {twice[0]!r}")
        if self.source.stream and (self.sink.table or self.sink.replace):
            raise ValueError("sink: a stream needs a log, or a parquet folder without replace")
        return self

    @property
    def names(self) -> list[str]:
        """The names of the steps' views."""
        return [step.name or f"step{number}" for number, step in enumerate(self.steps, 1)]


class Loaded(NamedTuple):
    """A pipeline and the name of its write."""

    pipeline: Pipeline
    sink_id: str


class Ran(NamedTuple):
    """The result of a run: rows to print, or the number of events and whether an earlier run published them."""

    table: DataFrame | None = None
    events: int | None = None
    done_before: bool = False


def load(path: str | Path) -> Loaded:
    """Read and check a file without Spark. Raises `ConfigInvalid` with the file and the field."""
    path = Path(path)
    try:
        data = path.read_bytes()
        given = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigInvalid(str(path), f"the file cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigInvalid(str(path), f"the file is not valid TOML: {error}") from error
    with config_errors(within=str(path), noun="field"):
        pipeline = Pipeline(**_absolute(given, path.absolute().parent))
    _check_paths(pipeline, path)
    return Loaded(pipeline, pipeline.id or f"{path.stem} {blake2b(data, digest_size=12).hexdigest()}")


def run(spark: SparkSession, loaded: Loaded) -> Ran:
    """Run a checked pipeline. A stream runs until it is stopped, or with `until = "read"` until all events are read."""
    pipeline, sink = loaded.pipeline, loaded.pipeline.sink
    if sink.log is not None and not pipeline.source.stream:
        done = published(Path(sink.log), loaded.sink_id)
        if done is not None:
            return Ran(events=done, done_before=True)
    spark = spark.newSession()  # so that its views are private
    with spark_errors():
        made = _source(spark, pipeline.source)
        made.createOrReplaceTempView(EVENTS)
        for name, step in zip(pipeline.names, pipeline.steps, strict=True):
            made = spark.sql(step.sql)
            made.createOrReplaceTempView(name)
        if pipeline.source.stream:
            _stream(made, pipeline)
        elif sink.log is not None:
            return Ran(events=write(made, Path(sink.log), loaded.sink_id, **_keyed(sink)))
        elif sink.parquet is not None:
            with parquet(made, sink.parquet, replace=sink.replace):
                pass
    return Ran(table=made if sink.table else None)


def _source(spark: SparkSession, source: PipelineSource) -> DataFrame:
    if not source.stream:
        return read(spark, source.log, key=source.key, start=source.first, end=source.last, cold=source.cold)
    options = {"key": " ".join(source.key)} if source.key else {}
    if source.first is not None:
        begin = source.first.isoformat() if isinstance(source.first, datetime) else str(source.first)
        options["startOffset" if source.start is not None else "from"] = begin
    return spark.readStream.format("zbus").options(**options).load(source.log)


def _stream(made: DataFrame, pipeline: Pipeline) -> None:
    source, sink = pipeline.source, pipeline.sink
    writer = made.writeStream.outputMode("append").option("checkpointLocation", source.checkpoint)
    if source.until == "read":
        writer = writer.trigger(availableNow=True)
    if sink.log is not None:
        named = {"sinkId": pipeline.id} if pipeline.id else {}
        query = writer.format("zbus").options(**_keyed(sink), **named).start(sink.log)
    else:
        query = writer.format("parquet").start(sink.parquet)
    try:
        query.awaitTermination()
    finally:
        query.stop()


def _keyed(sink: PipelineSink) -> dict[str, str]:
    return {} if sink.key is None else {"key": sink.key}


def _absolute(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields with absolute paths."""
    made = dict(given)
    for table, fields in (("source", ("log", "cold", "checkpoint")), ("sink", ("log", "parquet"))):
        if isinstance(given.get(table), dict):
            made[table] = dict(given[table])
            for field in fields:
                value = made[table].get(field)
                if isinstance(value, str) and value and "://" not in value:
                    made[table][field] = os.path.normpath(folder / Path(value).expanduser())
    return made


def _check_paths(pipeline: Pipeline, path: Path) -> None:
    """Raise `ConfigInvalid` if the source does not exist, or if the sink or the checkpoint cannot be written."""
    source, sink = pipeline.source, pipeline.sink
    if "://" not in source.log and not Path(source.log).is_file():
        raise ConfigInvalid(f"{path}: source.log", f"there is no log {source.log!r}")
    for field, target in (
        ("source.checkpoint", source.checkpoint),
        ("sink.log", sink.log),
        ("sink.parquet", sink.parquet),
    ):
        if target is None or ("://" in target and field != "sink.log"):
            continue
        if "://" in target:
            raise ConfigInvalid(f"{path}: {field}", "a sink writes to a log file on the driver's host")
        if not Path(target).parent.is_dir():
            raise ConfigInvalid(f"{path}: {field}", f"there is no folder {str(Path(target).parent)!r}")
        if not os.access(Path(target) if Path(target).is_dir() else Path(target).parent, os.W_OK):
            raise ConfigInvalid(f"{path}: {field}", f"{target!r} cannot be written")
    if sink.parquet is not None and not sink.replace and not source.stream and Path(sink.parquet).exists():
        raise ConfigInvalid(
            f"{path}: sink.parquet", f"{sink.parquet!r} already exists; set replace = true to replace it"
        )
