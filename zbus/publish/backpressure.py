"""Backpressure: publishers wait while too many bytes await commit or sending, or a subscription blocks them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from zbus.observe.records import EVENT_BACKPRESSURE, record_reason
from zbus.observe.throttle import Throttle
from zbus.util.runtime import Runtime

RECORD_EVERY_S = 1.0  # at most; every time is counted


class Backpressure:
    """Rarely blocks; `blocked` is all that the hot path looks at.

    Publishers that wait are served in the order of their arrival: sets of objects have the order of their addresses, so
    the reasons and the waiting publishers are dicts.
    """

    __slots__ = ("_reasons", "_throttle", "_waiters", "blocked", "blocked_count")

    def __init__(self, runtime: Runtime) -> None:
        self.blocked = False
        self.blocked_count = 0  # how often publishers had to wait
        self._throttle = Throttle(RECORD_EVERY_S, runtime.monotonic)
        self._reasons: dict[Any, None] = {}
        self._waiters: dict[asyncio.Future[None], None] = {}

    def block(self, reason: object, code: str, why: str) -> None:
        """Let publishers that `reason` concerns wait. The record has `code` for programs, and `why` for people."""
        if reason in self._reasons:
            return
        self._reasons[reason] = None
        self.blocked = True
        self.blocked_count += 1
        if self._throttle.due():
            record_reason(EVENT_BACKPRESSURE, logging.INFO, code=code, reason=why, blocked_total=self.blocked_count)

    def unblock(self, reason: object) -> None:
        """Take one reason away. Every publisher that waits then looks at the others again."""
        if reason in self._reasons:
            del self._reasons[reason]
            self.blocked = bool(self._reasons)
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def applies(self, concerned: Callable[[AbstractSet[Any]], bool]) -> bool:
        """Return whether any of the reasons concerns the caller."""
        return self.blocked and concerned(self._reasons.keys())

    async def wait(self, concerned: Callable[[AbstractSet[Any]], bool]) -> None:
        """Wait while any of the reasons concerns the caller. If cancelled, it leaves nothing behind."""
        while self.applies(concerned):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                del self._waiters[waiter]
