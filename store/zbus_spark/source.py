"""The format `zbus`: `spark.read.format("zbus").load("app.db")`, and the same as a stream.

A load is a snapshot: it reads up to the head that the log has at the first action, and later actions on the same
DataFrame see the same events. Filters are not pushed down, because Spark 4.3 keeps one state per load and a
filtered query would change later ones: select events with options.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from .columns import RAW, SCHEMA, Columns
from .options import ReadOptions
from .partitions import parts, planned_span, read_part

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

    from .stream import StreamReader


class ZbusSource(DataSource):
    """The data source of `format("zbus")`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "zbus"

    def schema(self) -> StructType:
        """Return the columns of a log."""
        return RAW if ReadOptions.parse(self.options).raw else SCHEMA

    def reader(self, schema: StructType) -> BatchReader:
        """Return a reader of a snapshot."""
        return BatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        """Return a reader that follows the log as it grows."""
        from .stream import StreamReader

        return StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return a writer that publishes rows exactly once."""
        from .sink import make_writer

        return make_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """Return a writer that publishes the rows of each micro-batch exactly once."""
        from .sink import make_stream_writer

        return make_stream_writer(self.options, schema, overwrite)


class BatchReader(DataSourceReader):
    """Plans a snapshot on the driver and reads it on the executors."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = ReadOptions.parse(options)
        self.columns = Columns(schema, self.options.raw)

    def partitions(self) -> list[InputPartition]:
        """Return the ranges of offsets up to the current head."""
        options = self.options
        return list(parts(options, planned_span(options)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the events of one range."""
        return read_part(self.options, self.columns, partition)


def _in_worker() -> bool:
    """Whether Spark's daemon runs this, itself or imported by the module that `spark.python.daemon.module` names."""
    main = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None)
    return main == "pyspark.daemon" or "pyspark.daemon" in sys.modules


# Spark's workers run the garbage collector after each task, and scanning the objects of all modules took a quarter of
# their time. Freezing exempts the modules that are imported by now.
if _in_worker():
    gc.freeze()
