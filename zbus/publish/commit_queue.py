"""The commit queue: from publishers to the log and back, one burst per turn of the loop and one wake-up per commit.

Events that are published during one turn of the event loop are appended to the log together, and the results of one
commit come back together. So the work per event on the loop is a row, a future and two list entries. The log's tail
comes back through the same mailbox, before the result of its append: an event is delivered before the `await` of its
publisher returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from zbus.errors import LogError, renewed
from zbus.event import Offset, offset_of
from zbus.observe.burst_records import BurstRecords
from zbus.observe.histogram import Histogram
from zbus.observe.records import wanted
from zbus.ports.log import (
    AppendResult,
    Committed,
    Log,
    Outcome,
    Refused,
    Row,
    Stored,
    Unknown,
    identity_conflict,
)
from zbus.util.mailbox import Mailbox
from zbus.util.runtime import Runtime

from .backpressure import Backpressure

# A burst of this size is appended immediately, so that the log can begin before the rest arrives, and so that
# publishers wait as soon as too many bytes await commit.
FLUSH_ROWS, FLUSH_BYTES = 128, 1024 * 1024

# A future for the offset of one row; or a future for the result of several rows, and their number.
Waiter = asyncio.Future[Any] | tuple[asyncio.Future[Any], int]
Listener = Callable[[Sequence[Row], Sequence[int]], None]


class Burst(msgspec.Struct, gc=False):
    """Rows that were appended together, and the futures that wait for them."""

    rows: list[Row]
    waiters: list[Waiter]
    size: int
    begun: int  # the monotonic time of the append, in ns
    single: bool  # each future waits for one row


class CommitQueue:
    """Collects rows, appends them and resolves their futures. Runs on one event loop; the log's thread only posts."""

    def __init__(
        self,
        log: Log,
        backpressure: Backpressure,
        pending_bytes_max: int,
        listeners: Sequence[Listener],
        took: Histogram | None,
        count: Callable[[str, int], None],
        burst_records: BurstRecords,
        runtime: Runtime,
    ) -> None:
        """Open the queue. `listeners` are called in order with each part of the log's tail."""
        self._append, self._backpressure, self.listeners = log.append, backpressure, tuple(listeners)
        self._pending_bytes_max, self._took, self._count = pending_bytes_max, took, count
        self._monotonic_ns, self._burst_records = runtime.monotonic_ns, burst_records
        self._loop = asyncio.get_running_loop()
        self._rows: list[Row] = []
        self._waiters: list[Waiter] = []
        self._bytes = self.pending_bytes = 0
        self._in_flight: dict[int, Burst] = {}  # by `id`: bursts that the log has not answered
        self._path, self._closed = log.path, False
        self._mailbox = Mailbox[AppendResult | Committed](self._loop, self._take)
        self._behind, self._single = False, True
        self.stored_events = 0  # by this node: its own events, and those of other nodes that it keeps
        self._idle: asyncio.Future[None] | None = None
        self.tail_after = log.tail(self._mailbox.post)  # every event after this offset is delivered

    def add(self, row: Row) -> asyncio.Future[Offset]:
        """Queue one row. The returned future gets its offset once the row is durable."""
        future: asyncio.Future[Offset] = self._loop.create_future()
        rows = self._rows
        if not rows and self._in_flight:
            self._loop.call_soon(self._flush)
        rows.append(row)
        self._waiters.append(future)
        self._bytes += len(row.payload)
        # The log is idle, or the burst is full.
        if not self._in_flight or len(rows) >= FLUSH_ROWS or self._bytes >= FLUSH_BYTES:
            self._flush()
        return future

    def add_many(self, rows: Sequence[Row]) -> asyncio.Future[Stored]:
        """Queue rows for one commit. The returned future gets their offsets once they are durable."""
        future: asyncio.Future[Stored] = self._loop.create_future()
        if not self._rows:
            self._loop.call_soon(self._flush)
        self._rows.extend(rows)
        self._waiters.append((future, len(rows)))
        self._single = False
        self._bytes += sum([len(row.payload) for row in rows])
        if self._bytes >= FLUSH_BYTES:
            self._flush()
        return future

    async def drained(self) -> None:
        """Wait until all queued rows are stored or have failed."""
        while self._rows or self._in_flight:
            self._idle = self._idle or self._loop.create_future()
            await asyncio.shield(self._idle)

    def close(self) -> None:
        """Fail all publishers that still wait for the log, because it was closed or did not close in time."""
        self._closed = True
        self._take(self._mailbox.clear())
        self._flush()
        reason = f"{self._path} was closed before it replied"
        self._take([AppendResult(burst, Unknown(LogError(reason))) for burst in self._in_flight.values()])

    def _flush(self) -> None:
        if not self._rows:
            return
        burst = Burst(self._rows, self._waiters, self._bytes, self._monotonic_ns(), self._single)
        self._rows, self._waiters, self._bytes, self._single = [], [], 0, True
        if self._closed:
            return self._fail(burst, Refused(LogError(f"{self._path} is closed")))
        self._in_flight[id(burst)] = burst
        self.pending_bytes += burst.size
        try:
            self._append(burst.rows, self._mailbox.post, burst)
        except Exception as error:  # a defect of the log: its publishers must not wait for a result
            self._mailbox.post(AppendResult(burst, self._defect(error, "appended to the log")))
        if self.pending_bytes > self._pending_bytes_max:
            self._behind = True
            self._backpressure.block(self, "commits_pending", "too many bytes await commit")

    def _take(self, items: list[AppendResult | Committed]) -> None:
        """Deliver the log's tail and resolve the futures of publishers. No item may keep the next one from its turn."""
        for item in items:
            if type(item) is Committed:
                self._deliver(item)
                continue
            assert type(item) is AppendResult
            if item.committed is not None:
                self._deliver(item.committed)
            burst: Burst = item.about
            if self._in_flight.pop(id(burst), None) is None:
                continue  # the queue was closed: its publishers have failed with an unknown outcome
            self.pending_bytes -= burst.size
            try:
                self._resolve(burst, item.outcome)
            except Exception as error:  # a defect of the log, such as the wrong number of offsets
                self._fail(burst, self._defect(error, "resolved"))
        if self._behind and self.pending_bytes <= self._pending_bytes_max:
            self._behind = False
            self._backpressure.unblock(self)
        if self._idle is not None and not self._in_flight and not self._rows:
            self._idle.set_result(None)
            self._idle = None

    def _deliver(self, committed: Committed) -> None:
        for listener in self.listeners:
            try:
                listener(committed.rows, committed.offsets)
            except Exception as error:
                self._defect(error, "delivered")
        if wanted(logging.DEBUG):
            self._record_published(committed)

    def _defect(self, error: Exception, doing: str) -> Unknown:
        """Report an unexpected exception to the loop's exception handler. Returns the outcome for publishers."""
        self._loop.call_exception_handler({"message": f"events could not be {doing}", "exception": error})
        return Unknown(LogError(f"{self._path}: unexpected {error!r}"))

    def _resolve(self, burst: Burst, outcome: Outcome) -> None:
        if not isinstance(outcome, Stored):
            return self._fail(burst, outcome)
        if self._took is not None:
            self._took.add(self._monotonic_ns() - burst.begun)
        self.stored_events += len(burst.rows) - len(outcome.repeated)
        if outcome.repeated or not burst.single:
            return _resolve_parts(burst, outcome)
        for waiter, row, number in zip(burst.waiters, burst.rows, outcome.offsets, strict=True):
            offset = Offset(number)
            offset.identity = (row.publisher_id, row.sequence)
            try:
                waiter.set_result(offset)  # type: ignore[union-attr]
            except asyncio.InvalidStateError:
                pass  # its publisher was cancelled; the event is stored

    def _fail(self, burst: Burst, outcome: Refused | Unknown) -> None:
        """Raise the error in every publisher: for each a new one, with its own events."""
        unknown, at = type(outcome) is Unknown, 0
        if unknown:
            self._count("outcome_unknown", len(burst.rows))
        for waiter in burst.waiters:
            future, number = waiter if type(waiter) is tuple else (waiter, 1)
            assert isinstance(future, asyncio.Future)
            if not future.done():
                error = renewed(outcome.error)
                error.outcome = "unknown" if unknown else "refused"
                error.events = tuple([row.event() for row in burst.rows[at : at + number]])
                future.set_exception(error)
            at += number

    def _record_published(self, committed: Committed) -> None:
        own = [(row, offset) for row, offset in zip(*committed, strict=True) if row.provenance is None]
        if own:
            self._burst_records.published([row for row, _ in own], [offset for _, offset in own])


def _resolve_parts(burst: Burst, stored: Stored) -> None:
    """Resolve the futures of a burst in which a future waits for several rows, or in which rows were repeated."""
    offsets, repeated, conflicts = stored
    at = 0
    for waiter in burst.waiters:
        future, number = waiter if type(waiter) is tuple else (waiter, 0)
        assert isinstance(future, asyncio.Future)
        rows = burst.rows[at : at + (number or 1)]
        part = _part_of(stored, at, len(rows)) if repeated else Stored(offsets[at : at + len(rows)])
        if not future.done():
            if conflicts and (conflict := identity_conflict(rows, part)) is not None:
                future.set_exception(conflict)
            elif number:
                future.set_result(part)
            else:
                (row,) = rows
                future.set_result(offset_of(part.offsets[0], row.publisher_id, row.sequence, not part.repeated))
        at += len(rows)


def _part_of(stored: Stored, at: int, number: int) -> Stored:
    """Return the outcome of a part of the rows."""
    repeated = {index - at for index in stored.repeated if at <= index < at + number}
    conflicts = {index - at: key for index, key in stored.conflicts.items() if at <= index < at + number}
    return Stored(stored.offsets[at : at + number], repeated, conflicts)
