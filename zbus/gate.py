"""Where publishers wait: while too much is unwritten, or while a subscriber that must not drop is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Gate:
    """Open nearly always; `shut` is the one thing that the hot path looks at."""

    __slots__ = ("_reasons", "_waiters", "shut")

    def __init__(self) -> None:
        self.shut = False
        self._reasons: set[Any] = set()
        self._waiters: set[asyncio.Future[None]] = set()

    def close(self, reason: object) -> None:
        """Let publishers whom `reason` concerns wait."""
        self._reasons.add(reason)
        self.shut = True

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
