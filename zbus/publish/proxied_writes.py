"""Events that another process has this node publish: whole rows, which come from the log's thread.

They are the business of the bus like any other event: checked as if they were published here, held back while the
gate is shut, stored by the same commits, and so seen by subscribers, durable names and other nodes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from zbus.errors import EventInvalid, EventTooLarge, ZbusError
from zbus.headers import decode_headers, encode_headers
from zbus.ports.log import Answered, Row

if TYPE_CHECKING:
    from zbus.node import Engine
    from zbus.schema.validators import Checks


def check_rows(
    rows: Sequence[Row], check_key: Callable[[str], object], payload_bytes_max: int, checks: Checks | None = None
) -> None:
    """Refuse rows of which any could not have been published; raise `EventInvalid` with the reason."""
    for key in {row[3] for row in rows}:
        check_key(key)
    largest = max([len(row[4]) for row in rows], default=0)
    if largest > payload_bytes_max:
        raise EventTooLarge("payload", largest, payload_bytes_max)
    for headers in {row[5] for row in rows if row[5]}:
        try:
            encode_headers(dict(decode_headers(headers)), None, None)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EventInvalid(f"headers that do not decode ({error}); not stored") from error
    if checks is not None:
        for row in rows:
            checks.hold(row[3], row[4])


class Intake:
    """Lives on the loop of its bus; only `take` is called from the log's thread, and it only appends and wakes.

    What is not with the log yet when the bus closes is not stored, and its `done` is not called.
    """

    def __init__(self, bus: Engine) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Sequence[Row], Answered]] = deque()
        self._storing: asyncio.Task[None] | None = None

    def take(self, rows: Sequence[Row], done: Answered) -> None:
        """Take rows, one at least, to be stored together or not at all; `done` is called on the loop."""
        self._waiting.append((rows, done))
        try:
            self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError:
            pass  # the loop is closed, and with it the bus

    def _begin(self) -> None:
        if self._bus.is_open and (self._storing is None or self._storing.done()):
            self._storing = self._loop.create_task(self._store())

    async def _store(self) -> None:
        bus = self._bus
        while self._waiting and bus.commits is not None:
            rows, done = self._waiting.popleft()
            try:
                check_rows(rows, bus.check_key, bus.payload_bytes_max, bus.checks)
            except EventInvalid as error:
                done(error)
                continue
            for key in {row[3] for row in rows} if bus.gate.shut else ():
                await bus.room(key)
            if not bus.is_open:
                return
            bus.commits.add_many(rows).add_done_callback(partial(_tell, done))


def _tell(done: Answered, stored: asyncio.Future[Sequence[int]]) -> None:
    error = stored.exception()
    if error is None:
        done(stored.result())
    elif isinstance(error, ZbusError):
        done(error)
