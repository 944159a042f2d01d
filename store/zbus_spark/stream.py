"""The log as a stream: each micro-batch is a range of offsets, which Spark stores in its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from zbus.errors import ConfigInvalid, LogTrimmed
from zbus.ports.log import Span

from .columns import Columns
from .options import ReadOptions
from .partitions import bounds, parts, planned_span, read_part

OFFSET = "offset"  # the last offset of a batch


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches on the driver and reads them on the executors."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = ReadOptions.parse(options)
        if self.options.end_offset is not None or self.options.to_ns is not None:
            raise ConfigInvalid("endOffset", "a stream has no end: read a range with spark.read")
        self.columns = Columns(schema, self.options.raw)
        self._until: int | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names
        """Return the offset before the first event to read."""
        return {OFFSET: planned_span(self.options).after}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the head, or the last offset of a batch of limited size. Raises `ConfigInvalid` for another log."""
        head = self._until if self._until is not None else bounds(self.options)[1]
        if head < start[OFFSET]:
            reason = f"the log ends at {head}, but this query has read up to {start[OFFSET]}: it is another log"
            raise ConfigInvalid("checkpoint", f"{reason}; begin with a new checkpointLocation")
        if isinstance(limit, ReadMaxRows):
            head = min(head, start[OFFSET] + limit.max_rows)
        return {OFFSET: head}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit `maxRowsPerBatch`."""
        rows = self.options.max_rows_per_batch
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Set the current head as the end of the stream."""
        self._until = bounds(self.options)[1]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the ranges of offsets of one batch. Raises `LogTrimmed` if a part of it was removed."""
        if start[OFFSET] >= end[OFFSET]:
            return []
        low_water, _ = bounds(self.options)
        after = start[OFFSET]
        if after < low_water:
            if self.options.fail_on_data_loss:
                raise LogTrimmed(after, low_water)
            after = low_water
        return list(parts(self.options, Span(after, end[OFFSET], self.options.from_ns, None)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the events of one range."""
        return read_part(self.options, self.columns, partition)
