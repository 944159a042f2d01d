"""The commit queue: from publishers to the log and back, one burst per turn of the loop and one wake-up per commit.

Events that are published during one turn of the event loop go to the log together, and what one commit stored comes
back together. So the work per event on the loop is a row, a future and two list entries. The log's tail comes back
through the same mailbox, before the append that it belongs to is answered: an event is delivered before the `await` of
its publisher returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zbus.event import Offset
from zbus.observe.histogram import Histogram
from zbus.ports.log import Committed, Log, Outcome, Row, Stored, Unknown
from zbus.util.mailbox import Mailbox
from zbus.util.runtime import Runtime

from .backpressure import Gate

# A burst of this many goes to the log at once, so that the log can take its work in parts.
FLUSH_ROWS = 128

# A future and how many rows it waits for; 0 stands for a single row, whose offset it gets.
Waiter = tuple["asyncio.Future[Offset] | asyncio.Future[Stored]", int]
Listener = Callable[[Sequence[Row], Sequence[int]], None]


class Burst:
    """Rows that went to the log together, and the futures that wait for them."""

    __slots__ = ("_post", "begun", "outcome", "rows", "size", "waiters")
    outcome: Outcome

    def __init__(
        self, rows: list[Row], waiters: list[Waiter], size: int, begun: int, post: Callable[[Burst], None]
    ) -> None:
        self.rows, self.waiters, self.size, self.begun, self._post = rows, waiters, size, begun, post

    def done(self, outcome: Outcome) -> None:
        """On the log's thread."""
        self.outcome = outcome
        self._post(self)


class Commits:
    """Lives on one event loop; the log's thread only posts into its mailbox."""

    def __init__(
        self,
        log: Log,
        backpressure: Gate,
        pending_bytes_max: int,
        listeners: Sequence[Listener],
        took: Histogram | None,
        count: Callable[[str, int], None],
        runtime: Runtime,
    ) -> None:
        """`listeners` are called with each part of the log's tail, in order."""
        self._append, self._backpressure, self._listeners = log.append, backpressure, tuple(listeners)
        self._pending_bytes_max, self._took, self._count = pending_bytes_max, took, count
        self._monotonic_ns = runtime.monotonic_ns
        self._loop = asyncio.get_running_loop()
        self._rows: list[Row] = []
        self._waiters: list[Waiter] = []
        self._bytes = self.pending_bytes = self._in_flight = 0
        self._mailbox = Mailbox[Burst | Committed](self._loop, self._take)
        self._idle: asyncio.Future[None] | None = None
        log.tail(self._mailbox.post)

    def add(self, row: Row) -> asyncio.Future[Offset]:
        """Take one row; the future holds its offset once it is durable."""
        future: asyncio.Future[Offset] = self._loop.create_future()
        rows = self._rows
        if not rows and self._in_flight:
            self._loop.call_soon(self._flush)
        rows.append(row)
        self._waiters.append((future, 0))
        self._bytes += len(row.payload)
        if not self._in_flight or len(rows) >= FLUSH_ROWS:  # the log has nothing to do, or enough
            self._flush()
        return future

    def add_many(self, rows: Sequence[Row]) -> asyncio.Future[Stored]:
        """Take rows that are to be stored in one commit."""
        future: asyncio.Future[Stored] = self._loop.create_future()
        if not self._rows:
            self._loop.call_soon(self._flush)
        self._rows.extend(rows)
        self._waiters.append((future, len(rows)))
        self._bytes += sum([len(row.payload) for row in rows])
        return future

    async def drained(self) -> None:
        """Wait until everything that was added is stored or has failed."""
        while self._rows or self._in_flight:
            self._idle = self._idle or self._loop.create_future()
            await asyncio.shield(self._idle)

    def _flush(self) -> None:
        if not self._rows:
            return
        burst = Burst(self._rows, self._waiters, self._bytes, self._monotonic_ns(), self._mailbox.post)
        self._rows, self._waiters, self._bytes = [], [], 0
        self._in_flight += 1
        self.pending_bytes += burst.size
        if self.pending_bytes > self._pending_bytes_max:
            self._backpressure.close(self, "the log is behind")
        self._append(burst.rows, burst.done)

    def _take(self, items: list[Burst | Committed]) -> None:
        for item in items:
            if type(item) is Committed:
                for listener in self._listeners:
                    listener(item.rows, item.offsets)
                continue
            assert type(item) is Burst
            self._in_flight -= 1
            self.pending_bytes -= item.size
            if type(item.outcome) is not Stored:
                self._fail(item)
                continue
            if self._took is not None:
                self._took.add(self._monotonic_ns() - item.begun)
            at = 0
            (offsets, repeated), rows = item.outcome, item.rows
            for waiter, number in item.waiters:
                if number:
                    if not waiter.done():
                        waiter.set_result(_part(item.outcome, at, number))  # type: ignore[arg-type]
                    at += number
                else:
                    if not waiter.done():
                        row = rows[at]
                        waiter.set_result(Offset(offsets[at], row.publisher_id, row.sequence, at not in repeated))  # type: ignore[arg-type]
                    at += 1
        if self.pending_bytes <= self._pending_bytes_max:
            self._backpressure.open(self)
        if self._idle is not None and not self._in_flight and not self._rows:
            self._idle.set_result(None)
            self._idle = None

    def _fail(self, burst: Burst) -> None:
        assert not isinstance(burst.outcome, Stored)
        if isinstance(burst.outcome, Unknown):
            self._count("outcome_unknown", len(burst.rows))
        for waiter, _ in burst.waiters:
            if not waiter.done():
                waiter.set_exception(burst.outcome.error)


def _part(stored: Stored, at: int, number: int) -> Stored:
    offsets, repeated = stored
    if repeated:
        repeated = {index - at for index in repeated if at <= index < at + number}
    return Stored(offsets[at : at + number], repeated)
