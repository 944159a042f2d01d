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

STALLED_S = 5.0  # how long a publisher waits for a subscription that is not read before a warning
RECORD_EVERY_S = 1.0  # minimum interval between log records; the counter counts every block
WAKE_MAX = 256  # waiters per turn of the loop: the first ones may fill the capacity that became free

Concerned = Callable[[AbstractSet[Any]], bool]  # whether any of these reasons concerns a publisher


class _Waiter:
    """One publisher that waits. It keeps its place if it is blocked again before it could publish."""

    __slots__ = ("concerned", "since", "woken")

    def __init__(self, concerned: Concerned, since: float) -> None:
        self.concerned, self.since = concerned, since
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Backpressure:
    """The reasons why publishers have to wait. The hot path only reads `blocked`, which is rarely True.

    Waiting publishers are served in the order of their arrival, so they and the reasons are dicts: the order of a set
    of objects depends on their addresses. A publisher that arrives when a reason was just removed waits behind those
    that waited for it; otherwise it would overtake them, and a busy publisher would take every free place.
    """

    __slots__ = (
        "_alarm",
        "_clearing",
        "_progress",
        "_reasons",
        "_runtime",
        "_throttle",
        "_waiters",
        "blocked",
        "blocked_count",
    )

    def __init__(self, runtime: Runtime) -> None:
        self.blocked = False
        self.blocked_count = 0  # how often publishers were blocked
        self._runtime = runtime
        self._throttle = Throttle(RECORD_EVERY_S, runtime.monotonic)
        self._progress: dict[Any, float] = {}  # when each subscription that blocks was last read, until it is reported
        self._alarm: asyncio.TimerHandle | None = None
        self._reasons: dict[Any, None] = {}
        self._clearing: dict[Any, None] = {}  # removed reasons whose waiters have not all had their turn
        self._waiters: dict[_Waiter, None] = {}

    def block(self, reason: object, code: str, why: str) -> None:
        """Block the publishers that `reason` concerns. The log record has `code` for programs and `why` for people."""
        if reason in self._reasons:
            return
        self._reasons[reason] = None
        if hasattr(reason, "key_exprs"):  # a subscription
            self._progress[reason] = self._runtime.monotonic()
            self._watch()
        self.blocked = True
        self.blocked_count += 1
        if self._throttle.due():
            total = self.blocked_count
            with self._runtime.running():
                record_reason(EVENT_BACKPRESSURE, logging.INFO, code=code, reason=why, blocked_total=total)

    def unblock(self, reason: object) -> None:
        """Remove a reason. The publishers that wait then check the remaining ones, in order."""
        if reason in self._reasons:
            del self._reasons[reason]
            self._progress.pop(reason, None)
            waking = bool(self._clearing)
            if self._waiters:
                self._clearing[reason] = None
            self.blocked = bool(self._reasons or self._clearing)
            if self._clearing and not waking:
                self._wake()

    def progressed(self, reason: object) -> None:
        """Note that the subscription `reason` was read while it blocks publishers."""
        if reason in self._progress:
            self._progress[reason] = self._runtime.monotonic()

    def applies(self, concerned: Concerned) -> bool:
        """Return whether any of the reasons concerns the caller."""
        return bool(self._reasons) and concerned(self._reasons.keys())

    async def wait(self, concerned: Concerned) -> None:
        """Wait while any of the reasons concerns the caller. If cancelled, no state is left behind."""
        if not self.blocked or not concerned(self._reasons.keys() | self._clearing.keys()):
            return
        waiter = _Waiter(concerned, self._runtime.monotonic())
        self._waiters[waiter] = None
        self._watch()
        try:
            await waiter.woken
            while self.applies(concerned):
                waiter.woken = asyncio.get_running_loop().create_future()
                await waiter.woken
        finally:
            del self._waiters[waiter]
            if self._alarm is not None and not self._waiters:
                self._alarm.cancel()
                self._alarm = None

    def _watch(self) -> None:
        """Start the timer of the warning if a publisher waits and a subscription blocks."""
        if self._alarm is None and self._progress and self._waiters:
            self._alarm = asyncio.get_running_loop().call_later(STALLED_S, self._report_stalled)

    def _report_stalled(self) -> None:
        """Warn, once for each time that it blocks, about a subscription that publishers wait for and no task reads."""
        due = self._runtime.monotonic() - STALLED_S
        for reason, read_at in tuple(self._progress.items()):
            waits = any(each.since <= due and each.concerned({reason}) for each in self._waiters)
            if read_at <= due and waits:
                del self._progress[reason]
                keys = tuple(reason.key_exprs)
                why = (
                    f"a publisher has waited {STALLED_S:g} s for the subscription on {', '.join(keys)}, which has "
                    "overflow='block', is full and is not read. Read it in another task than the one that publishes"
                )
                fields = {"keys": keys, "blocked_total": self.blocked_count}
                with self._runtime.running():
                    record_reason(
                        EVENT_BACKPRESSURE, logging.WARNING, code="subscription_not_read", reason=why, **fields
                    )
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._progress:
            self._alarm = asyncio.get_running_loop().call_later(STALLED_S / 5, self._report_stalled)

    def _wake(self) -> None:
        """Wake the first waiters that no reason concerns, then the next ones, until every one had its turn."""
        woken = 0
        for waiter in self._waiters:
            if not waiter.woken.done() and not self.applies(waiter.concerned):
                waiter.woken.set_result(None)
            woken += waiter.woken.done()
            if woken == WAKE_MAX:
                break
        if woken:
            asyncio.get_running_loop().call_soon(self._wake)
        else:
            self._clearing.clear()
            self.blocked = bool(self._reasons)
