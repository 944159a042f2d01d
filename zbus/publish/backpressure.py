"""Where publishers wait: while too much is unwritten, or while a subscriber that must not drop is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from zbus.observe.records import EVENT_BACKPRESSURE, record

TELL_EVERY_S = 1.0  # while it goes on; every time is counted


class Gate:
    """Open nearly always; `shut` is the one thing that the hot path looks at."""

    __slots__ = ("_reasons", "_told_at", "_waiters", "closings", "shut")

    def __init__(self) -> None:
        self.shut = False
        self.closings = 0  # how often publishers had to wait
        self._told_at = -TELL_EVERY_S
        self._reasons: set[Any] = set()
        self._waiters: set[asyncio.Future[None]] = set()

    def close(self, reason: object, why: str) -> None:
        """Let publishers whom `reason` concerns wait; `why` is for people."""
        if reason in self._reasons:
            return
        self._reasons.add(reason)
        self.shut = True
        self.closings += 1
        if time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._told_at = time.monotonic()
            record(EVENT_BACKPRESSURE, reason=why, closings_total=self.closings)

    def open(self, reason: object) -> None:
        """Take one reason away and let everybody look again."""
        if reason in self._reasons:
            self._reasons.discard(reason)
            self.shut = bool(self._reasons)
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self, concerned: Callable[[set[Any]], bool]) -> None:
        """Wait while any of the reasons concerns the caller. Cancelled, it leaves nothing behind."""
        while self.shut and concerned(self._reasons):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
