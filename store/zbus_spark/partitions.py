"""Ranges of offsets: planned on the driver, read by one task each."""

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
    """The offsets after which, and up to which, the log has events now."""
    if not options.remote:
        return local.bounds(options.path)
    with _connect(options, options.origin) as log:
        _, head, low_water = log.describe()
        return low_water, head


def planned_span(options: ReadOptions) -> Span:
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
    with _connect(options, options.origin) as log:
        return next(log.pages(left), None) is None


def parts(options: ReadOptions, span: Span) -> Iterator[OffsetPartition]:
    """Cut a span into ranges of `rowsPerPartition` offsets."""
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
    """The events of one range, counted and complete, or an error."""
    if part.value is None:  # Spark's way of asking where there was nothing to plan
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
    from .remote import RemoteLog  # not before: most reads need no transport

    return RemoteLog(options.path, origin, options.timeout_s)
