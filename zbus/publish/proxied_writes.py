"""Proxied writes: events that another process requests this node to publish, as encoded rows from the log's thread.

They take the same publish path as all other events: they are checked, delayed by backpressure and stored by the same
commits, and so they reach subscribers, durable subscriptions and other nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from zbus.errors import BusClosed, ZbusError
from zbus.ports.log import IsWanted, Row, Stored, WriteDone
from zbus.util.mailbox import Mailbox

from .entry import Entry

# Writes that are being committed at a time. They may share one commit, which local publishers then have to wait for.
COMMITTING_MAX = 3

Write = tuple[Sequence[Row], WriteDone, IsWanted]


class ProxiedWrites:
    """Publishes proxied writes on the loop of the bus. Only `take` is called from the log's thread.

    Rows that were not appended to the log when the bus closes, or when their process no longer waits for them, are not
    stored, and their `done` is not called.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox[Write](self._loop, self._begin)
        # The last unfinished write of each key and of each publisher. The next one waits for it, which keeps their
        # order; writes of other keys and publishers do not wait while a key is blocked.
        self._last: dict[str | int, asyncio.Task[None]] = {}
        self._waiting: dict[asyncio.Task[None], IsWanted] = {}
        self._committing: set[asyncio.Future[Stored]] = set()

    def take(self, rows: Sequence[Row], done: WriteDone, is_wanted: IsWanted) -> None:
        """Queue at least one row. The rows are stored together or not at all, and `done` is called on the loop."""
        self._mailbox.post((rows, done, is_wanted))

    def _begin(self, writes: list[Write]) -> None:
        for task, is_wanted in self._waiting.items():
            if not is_wanted():  # otherwise those of clients that gave up would gather behind a blocked key
                task.cancel()
        for rows, done, is_wanted in writes:
            names: dict[str | int, None] = {name: None for row in rows for name in (row.key, row.publisher_id)}
            before = {self._last[name]: None for name in names if name in self._last}
            task = self._loop.create_task(self._store(rows, done, is_wanted, before))
            self._last.update(dict.fromkeys(names, task))
            self._waiting[task] = is_wanted
            task.add_done_callback(partial(self._ended, names))

    def _ended(self, names: Iterable[str | int], task: asyncio.Task[None]) -> None:
        del self._waiting[task]
        for name in names:
            if self._last.get(name) is task:
                del self._last[name]

    async def _store(
        self, rows: Sequence[Row], done: WriteDone, is_wanted: IsWanted, before: Collection[asyncio.Task[None]]
    ) -> None:
        entry = self._entry
        if before:
            await asyncio.wait(before)
        if entry.commits is None:
            return
        events = [(row.key, row.payload) for row in rows]
        try:
            entry.check_rows(rows)
            await entry.admit(events)
            while len(self._committing) >= COMMITTING_MAX:
                await asyncio.wait(self._committing, return_when=asyncio.FIRST_COMPLETED)
                await entry.admit(events)  # a key may be blocked now
        except BusClosed:
            return
        except ZbusError as error:
            done(error)
            return
        if not is_wanted():
            return
        entry.announce_keys(rows)
        stored = entry.commits.add_many(rows)
        self._committing.add(stored)
        stored.add_done_callback(self._committing.discard)
        stored.add_done_callback(partial(_report, done))


def _report(done: WriteDone, stored: asyncio.Future[Stored]) -> None:
    error = stored.exception()
    if error is None:
        done(stored.result().offsets)
    elif isinstance(error, ZbusError):
        done(error)
