"""The sealed part of a log: whole blocks that the writer has sealed, split into segments of a bounded size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sqlalchemy import Connection

from zbus_log.file.database import log_errors, snapshot
from zbus_log.file.tables import BLOCK, get_epoch, get_head, get_low_water
from zbus_log.read.reader import readable
from zbus_spark.offsets import following

SEGMENT_BYTES = 64 * 1024 * 1024  # of payloads, so that a segment fits into a reader's memory


class SealedRange(NamedTuple):
    """A range of offsets, both ends included, whose events no longer change."""

    first: int
    last: int
    events: int
    offsets: int  # the sum of its events' offsets, relative to `first`

    @property
    def name(self) -> str:
        """The name of its folder in the tier."""
        return f"{self.first:020}-{self.last:020}"


class Keep(NamedTuple):
    """The newest events, which are not offloaded: by number, by age in seconds, or by both."""

    max_events: int = 0
    max_age_s: float | None = None


class LogState(NamedTuple):
    """The epoch, low-water mark and sealed segments of a log in one snapshot."""

    epoch: bytes
    low_water: int
    sealed: list[SealedRange]


def read_state(path: str, after: int, segment_events: int, keep: Keep) -> LogState:
    """Return the state of a log, with its sealed segments after an offset or after the low-water mark if it is higher.

    A segment has at most `segment_events` events and `SEGMENT_BYTES` of payloads, but at least one block.
    """
    with _connected(path) as connection, snapshot(connection):
        low_water, head = get_low_water(connection), get_head(connection)
        after, until = max(after, low_water), head - keep.max_events
        newest_ns = (1 << 63) - 1 if keep.max_age_s is None else time.time_ns() - int(keep.max_age_s * 1e9)
        found = connection.exec_driver_sql(
            "SELECT block, events, bytes, ifnull(published_max, 0) FROM blocks WHERE block >= ? ORDER BY block",
            (following(after) // BLOCK,),
        )
        ranges: list[tuple[int, int]] = []
        first, last, events, size = following(after), after, 0, 0
        for block, block_events, block_bytes, published_max in found:
            if block * BLOCK + BLOCK - 1 > until or published_max > newest_ns:
                break
            if events and (events + block_events > segment_events or size + block_bytes > SEGMENT_BYTES):
                ranges.append((first, last))
                first, events, size = following(last), 0, 0
            last, events, size = block * BLOCK + BLOCK - 1, events + block_events, size + block_bytes
        if events:
            ranges.append((first, last))
        sealed = [SealedRange(first, last, *_count(connection, first, last)) for first, last in ranges]
        return LogState(get_epoch(connection), low_water, sealed)


def epoch_and_low_water(path: str) -> tuple[bytes, int]:
    """Return the epoch and the low-water mark of a log."""
    with _connected(path) as connection, snapshot(connection):
        return get_epoch(connection), get_low_water(connection)


@contextmanager
def _connected(path: str) -> Iterator[Connection]:
    engine = readable(path)
    try:
        with log_errors(path), engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _count(connection: Connection, first: int, last: int) -> tuple[int, int]:
    """Return the number of events in a range, and the sum of their offsets relative to `first`."""
    found = connection.exec_driver_sql(
        "SELECT count(*), ifnull(sum(offset - ?1), 0) FROM events WHERE offset BETWEEN ?1 AND ?2", (first, last)
    ).one()
    return int(found[0]), int(found[1])
