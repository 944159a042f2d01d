"""Ranges of offsets as partitions: planned on the driver, each read by one task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from zbus.errors import LogTrimmed
from zbus.ports.log import Span
from zbus_log.read.reader import Choice

from . import local
from .columns import Columns
from .options import ReadOptions

if TYPE_CHECKING:
    from .remote import RemoteLog


class OffsetPartition(InputPartition):
    """A range of offsets that one task reads."""

    def __init__(self, span: Span, choice: Choice | None, origin: int | None = None) -> None:
        super().__init__(tuple(span))
        self.span, self.choice, self.origin = span, choice, origin


def bounds(options: ReadOptions) -> tuple[int, int]:
    """Return the current low-water mark and head of the log."""
    if not options.remote:
        return local.bounds(options.path)
    with _connect(options, options.origin) as log:
        _, head, low_water = log.describe()
        return low_water, head


def planned_span(options: ReadOptions) -> Span:
    """Return the span to read, up to the current head at most.

    It begins at the low-water mark if the options name no start, or if their start was removed and they allow data
    loss. Raises `LogTrimmed` if the whole range was removed and they do not.
    """
    span = options.span
    low_water, head = bounds(options)
    if options.fail_on_data_loss and span.after < low_water and ends_before(options, low_water):
        raise LogTrimmed(span.after, low_water)
    if not options.start_offset or (span.after < low_water and not options.fail_on_data_loss):
        span = span._replace(after=low_water)
    return span._replace(until=head if span.until is None else min(span.until, head))


def ends_before(options: ReadOptions, low_water: int) -> bool:
    """Return whether the requested end lies before `low_water`, so that no row of the range is left."""
    if options.end_offset is not None and options.end_offset <= low_water:
        return options.end_offset > 0
    if options.to_ns is None:
        return False
    left = Span(low_water, None, None, options.to_ns)
    if not options.remote:
        return not local.holds(options.path, left)
    with _connect(options, options.origin) as log:
        return next(log.pages(left), None) is None


def parts(options: ReadOptions, span: Span) -> Iterator[OffsetPartition]:
    """Split a span into ranges of `rowsPerPartition` offsets."""
    choice: Choice | None = None
    origin = options.origin
    if options.remote:
        with _connect(options, origin) as log:
            origin, _, _ = log.describe()
    else:
        span, choice = local.plan(options.path, options.keys, span)
    assert span.until is not None
    rows = options.rows_per_partition
    for after in range(span.after, span.until, rows):
        yield OffsetPartition(span._replace(after=after, until=min(span.until, after + rows)), choice, origin)


def read_part(options: ReadOptions, columns: Columns, part: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the events of one range. Raises an error if one is missing."""
    if part.value is None:  # Spark passes this if no partition was planned
        return
    assert isinstance(part, OffsetPartition)
    if part.choice is not None:
        yield from local.batches(options.path, part.choice, part.span, columns, options.fail_on_data_loss)
        return
    with _connect(options, part.origin) as log:
        for events in log.pages(part.span, options.key, options.fail_on_data_loss):
            if events:
                yield columns.from_events(events)


def _connect(options: ReadOptions, origin: int | None) -> RemoteLog:
    from .remote import RemoteLog  # imported here, because most reads need no transport

    return RemoteLog(options.path, origin, options.timeout_s)
