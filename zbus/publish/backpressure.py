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

RECORD_EVERY_S = 1.0  # minimum interval between log records; the counter counts every block


class Backpressure:
    """The reasons why publishers have to wait. The hot path only reads `blocked`, which is rarely True.

    Waiting publishers are served in the order of their arrival, so they and the reasons are dicts: the order of a set
    of objects depends on their addresses.
    """

    __slots__ = ("_reasons", "_runtime", "_throttle", "_waiters", "blocked", "blocked_count")

    def __init__(self, runtime: Runtime) -> None:
        self.blocked = False
        self.blocked_count = 0  # how often publishers were blocked
        self._runtime = runtime
        self._throttle = Throttle(RECORD_EVERY_S, runtime.monotonic)
        self._reasons: dict[Any, None] = {}
        self._waiters: dict[asyncio.Future[None], None] = {}

    def block(self, reason: object, code: str, why: str) -> None:
        """Block the publishers that `reason` concerns. The log record has `code` for programs and `why` for people."""
        if reason in self._reasons:
            return
        self._reasons[reason] = None
        self.blocked = True
        self.blocked_count += 1
        if self._throttle.due():
            total = self.blocked_count
            with self._runtime.running():
                record_reason(EVENT_BACKPRESSURE, logging.INFO, code=code, reason=why, blocked_total=total)

    def unblock(self, reason: object) -> None:
        """Remove a reason. Every waiting publisher then checks the remaining ones."""
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
        """Wait while any of the reasons concerns the caller. If cancelled, no state is left behind."""
        while self.applies(concerned):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                del self._waiters[waiter]
