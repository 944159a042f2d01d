"""The format `zbus`: `spark.read.format("zbus").load("app.db")`, and the same as a stream.

A load is a snapshot: it reads up to the head that the log has at its first action, and later actions on the same
DataFrame see the same events. Filters are not pushed down, because Spark 4.3 keeps one state per load and a
filtered query would change later ones: say what to read by options.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from zbus.errors import LogTrimmed
from zbus.ports.log import Span
from zbus_log.read.reader import Choice

from . import local
from .columns import RAW, SCHEMA, Columns
from .options import ReadOptions

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

    from .remote import RemoteLog
    from .stream import StreamReader


class ZbusSource(DataSource):
    """What Spark makes of `format("zbus")`."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "zbus"

    def schema(self) -> StructType:
        """The columns of a log."""
        return RAW if ReadOptions.parse(self.options).raw else SCHEMA

    def reader(self, schema: StructType) -> Reader:
        """Reads a snapshot."""
        return Reader(self.options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        """Reads on as the log grows."""
        from .stream import StreamReader

        return StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Publishes rows, once."""
        from .sink import make_writer

        return make_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """Publishes rows of each micro-batch, once."""
        from .sink import make_stream_writer

        return make_stream_writer(self.options, schema, overwrite)


class Part(InputPartition):
    """A range of offsets that one task reads."""

    def __init__(self, span: Span, choice: Choice | None, origin: int | None = None) -> None:
        super().__init__(tuple(span))
        self.span, self.choice, self.origin = span, choice, origin


class Reader(DataSourceReader):
    """Plans on the driver, reads on the executors."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = ReadOptions.parse(options)
        self.columns = Columns(schema, self.options.raw)

    def partitions(self) -> list[InputPartition]:
        """Ranges of offsets up to the head of this moment."""
        options = self.options
        return list(parts(options, begin(options)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The events of one range."""
        return read_part(self.options, self.columns, partition)


def bounds(options: ReadOptions) -> tuple[int, int]:
    """The offsets after which, and up to which, the log has events now."""
    if not options.remote:
        return local.bounds(options.path)
    with _asked(options, options.origin) as log:
        _, head, low_water = log.describe()
        return low_water, head


def begin(options: ReadOptions) -> Span:
    """The span that the options name. It begins where the log does if they name no place, or allow for a loss."""
    span = options.span
    low_water, head = bounds(options)
    if options.fail_on_data_loss and span.after < low_water and ends_before(options, low_water):
        raise LogTrimmed(span.after, low_water)
    if not options.start_offset or (span.after < low_water and not options.fail_on_data_loss):
        span = span._replace(after=low_water)
    return span._replace(until=head if span.until is None else min(span.until, head))


def ends_before(options: ReadOptions, low_water: int) -> bool:
    """Whether the end that is asked for lies in what was removed, so that there would be no rows rather than few."""
    if options.end_offset is not None and options.end_offset <= low_water:
        return options.end_offset > 0
    if options.to_ns is None:
        return False
    left = Span(low_water, None, None, options.to_ns)
    if not options.remote:
        return not local.holds(options.path, left)
    with _asked(options, options.origin) as log:
        return next(log.pages(left), None) is None


def parts(options: ReadOptions, span: Span) -> Iterator[Part]:
    """Cut a span into ranges of `rowsPerPartition` offsets."""
    choice: Choice | None = None
    origin = options.origin
    if options.remote:
        with _asked(options, origin) as log:
            origin, _, _ = log.describe()
    else:
        span, choice = local.plan(options.path, options.keys, span)
    assert span.until is not None
    rows = options.rows_per_partition
    for after in range(span.after, span.until, rows):
        yield Part(span._replace(after=after, until=min(span.until, after + rows)), choice, origin)


def read_part(options: ReadOptions, columns: Columns, part: InputPartition) -> Iterator[pa.RecordBatch]:
    """The events of one range, counted and complete, or an error."""
    if part.value is None:  # Spark's way of asking where there was nothing to plan
        return
    assert isinstance(part, Part)
    if part.choice is not None:
        yield from local.batches(options.path, part.choice, part.span, columns, options.fail_on_data_loss)
        return
    with _asked(options, part.origin) as log:
        for events in log.pages(part.span, options.key, options.fail_on_data_loss):
            if events:
                yield columns.from_events(events)


def _asked(options: ReadOptions, origin: int | None) -> RemoteLog:
    from .remote import RemoteLog  # not before: most reads need no transport

    return RemoteLog(options.path, origin, options.timeout_s)


def _in_worker() -> bool:
    return getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None) == "pyspark.daemon"


# Spark's workers collect all garbage after each task, and look at every object of every module for it: a quarter of
# what they do. What is there by now stays.
if _in_worker():
    gc.freeze()
