"""From publishers to the log and back: one burst per turn of the loop, one wake per commit.

What is published during one turn of the event loop goes to the log together; what one commit stored
comes back together. So the work per event on the loop is a tuple, a future and two list entries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns

from zbus.errors import LogError
from zbus.observe.histogram import Histogram
from zbus.ports.log import Log, Row

from .backpressure import Backpressure

# A burst of this many goes to the log at once, so that the log can take its work in parts.
FLUSH_ROWS = 128

# A future and how many offsets it waits for; 0 stands for a single offset rather than a sequence of them.
Waiter = tuple["asyncio.Future[int] | asyncio.Future[Sequence[int]]", int]
Burst = tuple[list[Row], list[Waiter], int, int]  # with its bytes, and when it went to the log


class Commits:
    """Lives on one event loop; only `_done` is called from the log's thread, and it only appends and wakes."""

    def __init__(
        self,
        log: Log,
        backpressure: Backpressure,
        pending_bytes_max: int,
        stored: Callable[[Sequence[Row], Sequence[int]], None],
        took: Histogram | None,
    ) -> None:
        self._log, self._backpressure, self._stored = log, backpressure, stored
        self._pending_bytes_max, self._took = pending_bytes_max, took
        self._loop = asyncio.get_running_loop()
        self._rows: list[Row] = []
        self._waiters: list[Waiter] = []
        self._bytes = self.pending_bytes = self._in_flight = 0
        self._results: deque[tuple[Burst, Sequence[int] | LogError]] = deque()
        self._armed = False
        self._idle: asyncio.Future[None] | None = None

    def add(self, row: Row) -> asyncio.Future[int]:
        """Take one row; the future holds its offset once it is durable."""
        future: asyncio.Future[int] = self._loop.create_future()
        rows = self._rows
        if not rows and self._in_flight:
            self._loop.call_soon(self._flush)
        rows.append(row)
        self._waiters.append((future, 0))
        self._bytes += len(row[4])
        if not self._in_flight or len(rows) >= FLUSH_ROWS:  # the log has nothing to do, or enough
            self._flush()
        return future

    def add_many(self, rows: Sequence[Row]) -> asyncio.Future[Sequence[int]]:
        """Take rows that are to be stored in one commit."""
        future: asyncio.Future[Sequence[int]] = self._loop.create_future()
        if not self._rows:
            self._loop.call_soon(self._flush)
        self._rows.extend(rows)
        self._waiters.append((future, len(rows)))
        self._bytes += sum([len(row[4]) for row in rows])
        return future

    async def drained(self) -> None:
        """Wait until everything that was added is stored or has failed."""
        while self._rows or self._in_flight:
            self._idle = self._idle or self._loop.create_future()
            await asyncio.shield(self._idle)

    def _flush(self) -> None:
        burst: Burst = (self._rows, self._waiters, self._bytes, monotonic_ns())
        if not burst[0]:
            return
        self._rows, self._waiters, self._bytes = [], [], 0
        self._in_flight += 1
        self.pending_bytes += burst[2]
        if self.pending_bytes > self._pending_bytes_max:
            self._backpressure.block(self, "commits_pending", "too many bytes await commit")
        self._log.append(burst[0], lambda result: self._done(burst, result))

    def _done(self, burst: Burst, result: Sequence[int] | LogError) -> None:
        """On the log's thread."""
        self._results.append((burst, result))
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                pass  # the loop is closed: nobody is left to tell, and what is stored is stored

    def _drain(self) -> None:
        self._armed = False  # before draining, so that nothing is left unseen
        results = self._results
        while results:
            (rows, waiters, size, begun), result = results.popleft()
            self._in_flight -= 1
            self.pending_bytes -= size
            if isinstance(result, LogError):
                for waiter, _ in waiters:
                    if not waiter.done():
                        waiter.set_exception(result)
            else:
                if self._took is not None:
                    self._took.add(monotonic_ns() - begun)
                self._stored(rows, result)
                _resolve(waiters, result)
        if self.pending_bytes <= self._pending_bytes_max:
            self._backpressure.unblock(self)
        if self._idle is not None and not self._in_flight and not self._rows:
            self._idle.set_result(None)
            self._idle = None


def _resolve(waiters: list[Waiter], offsets: Sequence[int]) -> None:
    at = 0
    for waiter, count in waiters:
        if count:
            if not waiter.done():
                waiter.set_result(offsets[at : at + count])  # type: ignore[arg-type]
            at += count
        else:
            if not waiter.done():
                waiter.set_result(offsets[at])  # type: ignore[arg-type]
            at += 1
