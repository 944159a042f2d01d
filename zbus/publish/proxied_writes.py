"""Proxied writes: events that another process requests this node to publish, as encoded rows from the log's thread.

They take the same publish path as all other events: they are checked, delayed by backpressure and stored by the same
commits, and so they reach subscribers, durable subscriptions and other nodes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from zbus.errors import BusClosed, ZbusError
from zbus.ports.log import Row, Stored, WriteDone
from zbus.util.mailbox import Mailbox

from .entry import Entry

Write = tuple[Sequence[Row], WriteDone]


class ProxiedWrites:
    """Publishes proxied writes on the loop of the bus. Only `take` is called from the log's thread.

    Rows that were not appended to the log when the bus closes are not stored, and their `done` is not called.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox[Write](self._loop, self._begin)
        self._waiting: deque[Write] = deque()
        self._storing: asyncio.Task[None] | None = None

    def take(self, rows: Sequence[Row], done: WriteDone) -> None:
        """Queue at least one row. The rows are stored together or not at all, and `done` is called on the loop."""
        self._mailbox.post((rows, done))

    def _begin(self, writes: list[Write]) -> None:
        self._waiting.extend(writes)
        if self._storing is None or self._storing.done():
            self._storing = self._loop.create_task(self._store())

    async def _store(self) -> None:
        entry = self._entry
        while self._waiting and entry.commits is not None:
            rows, done = self._waiting.popleft()
            try:
                entry.check_rows(rows)
                await entry.admit((row.key, row.payload) for row in rows)
            except BusClosed:
                return
            except ZbusError as error:
                done(error)
                continue
            entry.announce_keys(rows)
            entry.commits.add_many(rows).add_done_callback(partial(_report, done))


def _report(done: WriteDone, stored: asyncio.Future[Stored]) -> None:
    error = stored.exception()
    if error is None:
        done(stored.result().offsets)
    elif isinstance(error, ZbusError):
        done(error)
