"""Rows become events: `df.write.format("zbus").mode("append").save("app.db")`, and the same of a stream.

Columns: `key` (text), `payload` (binary or text), and `headers` (a map of text) where there are any. With the option
`key` all rows go to one key, and there is no such column. Executors check rows and stage them; the driver publishes
them once all are there, through the node that owns the log if there is one, else as its owner. If one row is not
legal nothing is published.

Exactly once: a stream by its query and batch, which Spark's checkpoint remembers; any other write by the option
`sinkId`: of a write under a name that is done, nothing is published again. Without it each write is a new one.
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

from .commit import SinkBatch, discard, publish, publish_unnamed, remove_abandoned
from .staging import StagedPart, base_folder, run_folder, stage

_SPARK_OPTIONS = {"checkpointlocation", "queryname"}  # given with the others, and none of our business
_QUERY = "sql.streaming.queryId"  # a property that Spark gives to each task of a query
_TYPES: dict[str, tuple[type, ...]] = {"key": (StringType,), "payload": (BinaryType, StringType), "headers": (MapType,)}


class SinkOptions(BaseModel):
    """What `df.write.format("zbus")` understands, in Spark's spelling.

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
        """Options as Spark gives them: names in any case, values as text."""
        names = {field.alias.lower(): field.alias for field in cls.model_fields.values() if field.alias}
        values: dict[str, Any] = {
            names.get(name.lower(), name): value
            for name, value in options.items()
            if name.lower() not in _SPARK_OPTIONS
        }
        if not values.get("path"):
            raise ConfigInvalid("path", 'name a log: .save("app.db"), or .start("app.db")')
        if "://" in values["path"]:
            raise ConfigInvalid("path", f"{values['path']!r}: a sink writes to a log's file on the driver's host")
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
        """The log's file."""
        return Path(self.path).expanduser().absolute()


def make_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """What writes a DataFrame; every option and column is checked before a row is."""
    return _Writer(_Plan(options, schema, overwrite))


def make_stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """What writes the batches of a query."""
    return StreamWriter(_Plan(options, schema, overwrite))


class Staged(WriterCommitMessage):
    """What a task tells the driver."""

    def __init__(self, part: StagedPart | None, query: str | None) -> None:
        self.part, self.query = part, query


class _Plan:
    """What a write is to do. Made on the driver and sent to the executors."""

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
        """On an executor: check rows, and keep them for the commit."""
        task = TaskContext.get()
        query = None if task is None else task.getLocalProperty(_QUERY)
        return Staged(stage(self.folder, batches, self.key, self.payload_bytes_max), query)


class _Writer(DataSourceArrowWriter):
    """Spark sends it to the executors and, with their messages, to the process that commits."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """On an executor."""
        return self.plan.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver."""
        if self.plan.sink_id is not None:
            publish(self.plan.log, SinkBatch(self.plan.sink_id), _parts(messages))
        else:
            publish_unnamed(self.plan.log, _parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver. Spark calls it after a commit that failed as well."""
        discard(self.plan.log, _parts(messages))


class StreamWriter(DataSourceStreamArrowWriter):
    """Spark makes one to plan a query, which it sends to the executors, and one for each commit."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """On an executor."""
        return self.plan.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """On the driver."""
        query = next((each.query for each in messages if isinstance(each, Staged) and each.query), "")
        if not messages:
            return  # a batch that had no task at all
        sink = self.plan.sink_id or query
        if not sink:
            raise ConfigInvalid("sinkId", "this Spark does not tell which query it runs: name the sink by this option")
        publish(self.plan.log, SinkBatch(sink, query, batchId), _parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver. Spark calls it after a commit that failed as well."""
        discard(self.plan.log, _parts(messages))


def _parts(messages: list[WriterCommitMessage | None]) -> list[StagedPart]:
    return [each.part for each in messages if isinstance(each, Staged) and each.part is not None]


def _check_columns(schema: StructType, key: str | None) -> None:
    given = {field.name: field.dataType for field in schema.fields}
    if others := [name for name in given if name not in _TYPES]:
        chosen = "choose them with .select(...), or put the others into the payload with to_json(struct(...))"
        raise ConfigInvalid("columns", f"a sink takes key, payload and headers, and not {', '.join(others)}: {chosen}")
    if "payload" not in given:
        raise ConfigInvalid("columns", "there is no column `payload`")
    if key is None and "key" not in given:
        raise ConfigInvalid("columns", "there is no column `key`: add one, or give the option `key` for all rows")
    if key is not None and "key" in given:
        raise ConfigInvalid("key", "there is a column of that name too: leave out one of them")
    for name, kind in given.items():
        texts = isinstance(kind, MapType) and {type(kind.keyType), type(kind.valueType)} == {StringType}
        if not isinstance(kind, _TYPES[name]) or (name == "headers" and not texts):
            wanted = {"key": "string", "payload": "binary or string", "headers": "map<string,string>"}[name]
            raise ConfigInvalid("columns", f"`{name}` is {kind.simpleString()}, and a sink takes {wanted}")


def _check_log(log: Path) -> None:
    """Refuse what cannot be a log before a row is read."""
    if not log.parent.is_dir():
        raise ConfigInvalid("path", f"there is no folder {str(log.parent)!r} on the driver's host")
    if not log.exists():
        return  # the first commit makes it
    if not log.is_file():
        raise ConfigInvalid("path", f"{str(log)!r} is not a file")
    if log.stat().st_size:
        engine = make_engine(str(log), read_only=True)
        try:
            with log_errors(str(log)), engine.connect() as connection:
                check_is_log(connection, str(log))
        finally:
            engine.dispose()
