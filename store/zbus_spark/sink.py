"""The Spark sink: `df.write.format("zbus").mode("append").save("app.db")` publishes rows, and so does a stream.

The columns are `key` (text), `payload` (binary or text) and optionally `headers` (a map of text). With the option
`key`, all rows are published to that key, and there is no column `key`. Executors check and stage the rows; the driver
publishes them once all are staged, through the node that owns the log if one is running, otherwise as its owner. If
one row is invalid, nothing is published.

Rows are published exactly once. A stream is identified by its query and batch, which Spark's checkpoint stores; any
other write by the option `sinkId`: a repeated write under a completed name publishes nothing. Without a name, each
write is a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, MapType, StringType, StructType

from zbus.config import config_errors, load_config
from zbus.errors import ConfigInvalid, KeyInvalid
from zbus.keys import check_key
from zbus_log.file.database import log_errors, make_engine
from zbus_log.file.tables import check_is_log
from zbus_log.read.reader import readable

from .commit import SinkBatch, discard, publish, publish_unnamed, remove_abandoned
from .staging import StagedPart, base_folder, run_folder, stage

_SPARK_OPTIONS = {"checkpointlocation", "queryname"}  # Spark passes them too; the sink ignores them
_QUERY = "sql.streaming.queryId"  # a property that Spark sets for each task of a query
_TYPES: dict[str, tuple[type, ...]] = {"key": (StringType,), "payload": (BinaryType, StringType), "headers": (MapType,)}


class SinkOptions(BaseModel):
    """The options of `df.write.format("zbus")`, in Spark's spelling.

    >>> SinkOptions.parse({"path": "app.db", "sinkid": "daily"}).sink_id
    'daily'
    """

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)

    path: str
    key: str | None = None
    sink_id: str | None = Field(None, min_length=1, max_length=200)
    staging: str | None = Field(None, min_length=1)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Parse options as Spark passes them: names in any case, values as text. Raises `ConfigInvalid`."""
        names = {field.alias.lower(): field.alias for field in cls.model_fields.values() if field.alias}
        values: dict[str, Any] = {
            names.get(name.lower(), name): value
            for name, value in options.items()
            if name.lower() not in _SPARK_OPTIONS
        }
        if not values.get("path"):
            raise ConfigInvalid("path", 'name a log: .save("app.db"), or .start("app.db")')
        if "://" in values["path"]:
            raise ConfigInvalid("path", f"{values['path']!r}: a sink writes to a log file on the driver's host")
        with config_errors(known=names.values(), noun="option"):
            found = cls(**values)
        try:
            if found.key is not None:
                check_key(found.key)
        except KeyInvalid as error:
            raise ConfigInvalid("key", str(error)) from error
        return found

    @property
    def log(self) -> Path:
        """The absolute path of the log file."""
        return Path(self.path).expanduser().absolute()


def make_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """Return the writer for a DataFrame. Checks all options and columns first."""
    return _Writer(_Plan(options, schema, overwrite))


def make_stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """Return the writer for the batches of a streaming query. Checks all options and columns first."""
    return StreamWriter(_Plan(options, schema, overwrite))


class Staged(WriterCommitMessage):
    """The commit message of a task to the driver."""

    def __init__(self, part: StagedPart | None, query: str | None) -> None:
        self.part, self.query = part, query


class _Plan:
    """The checked parameters of a write. Created on the driver and sent to the executors."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        chosen = SinkOptions.parse(options)
        if overwrite:
            raise ConfigInvalid(
                "mode", 'a log is append-only: use mode("append"), or outputMode("append") for a stream'
            )
        _check_columns(schema, chosen.key)
        self.log, self.key, self.sink_id = chosen.log, chosen.key, chosen.sink_id
        _check_log(self.log)
        self.payload_bytes_max = load_config(log=str(self.log)).payload_bytes_max
        base = base_folder(self.log, chosen.staging)
        self.folder = run_folder(base)
        remove_abandoned(self.log, base)

    def write(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Check rows and stage them for the commit. Runs on an executor."""
        task = TaskContext.get()
        query = None if task is None else task.getLocalProperty(_QUERY)
        return Staged(stage(self.folder, batches, self.key, self.payload_bytes_max), query)


class _Writer(DataSourceArrowWriter):
    """The writer of a DataFrame. Spark sends it to the executors, and with their messages to the committing process."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage rows. Runs on an executor."""
        return self.plan.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish the staged rows. Runs on the driver."""
        if self.plan.sink_id is not None:
            publish(self.plan.log, SinkBatch(self.plan.sink_id), _parts(messages))
        else:
            publish_unnamed(self.plan.log, _parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove the staged rows. Runs on the driver; Spark calls it after a failed commit too."""
        discard(self.plan.log, _parts(messages))


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of a stream. Spark creates one to plan a query, for the executors, and one for each commit."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage rows. Runs on an executor."""
        return self.plan.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish the staged rows of a batch. Runs on the driver."""
        query = next((each.query for each in messages if isinstance(each, Staged) and each.query), "")
        if not messages:
            return  # the batch had no tasks
        sink = self.plan.sink_id or query
        if not sink:
            raise ConfigInvalid("sinkId", "this Spark does not report its query id: set this option to name the sink")
        publish(self.plan.log, SinkBatch(sink, query, batchId), _parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Remove the staged rows. Runs on the driver; Spark calls it after a failed commit too."""
        discard(self.plan.log, _parts(messages))


def _parts(messages: list[WriterCommitMessage | None]) -> list[StagedPart]:
    return [each.part for each in messages if isinstance(each, Staged) and each.part is not None]


def _check_columns(schema: StructType, key: str | None) -> None:
    given = {field.name: field.dataType for field in schema.fields}
    if others := [name for name in given if name not in _TYPES]:
        advice = "choose columns with .select(...), or put the others into the payload with to_json(struct(...))"
        raise ConfigInvalid("columns", f"a sink takes key, payload and headers, not {', '.join(others)}: {advice}")
    if "payload" not in given:
        raise ConfigInvalid("columns", "the column `payload` is missing")
    if key is None and "key" not in given:
        raise ConfigInvalid("columns", "the column `key` is missing: add it, or set the option `key` for all rows")
    if key is not None and "key" in given:
        raise ConfigInvalid("key", "there is also a column `key`: remove the option or the column")
    for name, kind in given.items():
        texts = isinstance(kind, MapType) and {type(kind.keyType), type(kind.valueType)} == {StringType}
        if not isinstance(kind, _TYPES[name]) or (name == "headers" and not texts):
            wanted = {"key": "string", "payload": "binary or string", "headers": "map<string,string>"}[name]
            raise ConfigInvalid("columns", f"`{name}` is {kind.simpleString()}, but must be {wanted}")


def _check_log(log: Path) -> None:
    """Raise `ConfigInvalid` if the file cannot be a log, or `LogDamaged`, before any row is read."""
    if not log.parent.is_dir():
        raise ConfigInvalid("path", f"there is no folder {str(log.parent)!r} on the driver's host")
    if not log.exists():
        return  # the first commit creates it
    if not log.is_file():
        raise ConfigInvalid("path", f"{str(log)!r} is not a file")
    if log.stat().st_size:
        engine = make_engine(str(log), read_only=True)
        try:
            with log_errors(str(log)), engine.connect() as connection:
                check_is_log(connection, str(log))
        finally:
            engine.dispose()
        readable(str(log)).dispose()
