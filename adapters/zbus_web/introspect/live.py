"""How the bus is doing, once a second, for all who look: worked out once, and only while somebody does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import msgspec

from zbus.errors import ZbusError
from zbus.introspection import CursorPosition, of
from zbus.observe.histogram import Histogram
from zbus_web.access.permissions import Permissions

from .views import Views, shown_cursors

TICK_S = 1.0
TOPICS = 50
WAITING_MAX = 10  # moments that wait for one listener; who reads more slowly than that misses some
_encode = msgspec.json.Encoder().encode


class StatsSnapshot:
    """The state of the bus at one time, and what happened since the moment before."""

    def __init__(
        self,
        views: Views,
        stats: dict[str, Any],
        cursors: Sequence[CursorPosition],
        before: StatsSnapshot | None,
    ) -> None:
        self._views, self._cursors, self._frames = views, cursors, dict[Hashable, bytes]()
        self.stats, self.at, self.clock_s = stats, datetime.now(UTC), monotonic()
        passed_s = self.clock_s - before.clock_s if before is not None else 0.0
        earlier = before.stats if before is not None else {}
        self.rates = {
            f"{name}_per_s": _per_s(stats.get(name, 0) - earlier.get(name, 0), passed_s)
            for name in ("published", "delivered")
        }
        self.latency = {
            f"{name}_ms": _between(earlier.get("latency", {}).get(name), figures)
            for name, figures in stats.get("latency", {}).items()
            if name in ("commit", "end_to_end")
        }
        kept = views.activity.records
        seen: int = before.record if before is not None else kept.last
        self._records = kept.after(seen)
        self.record: int = self._records[-1]["id"] if self._records else seen

    def shown(self, grant: Permissions) -> dict[str, Any]:
        """What a grant may see of it."""
        return {
            "at": self.at.isoformat(timespec="milliseconds"),
            "stats": self.stats,
            "topics": self._views.topics(grant, TOPICS),
            "rates": self.rates,
            "latency": self.latency,
            "subscribers": self._views.subscribers(grant),
            "cursors": shown_cursors(grant, self._cursors),
            "nodes": self._views.nodes(grant),
            "records": self._records if grant.sees_all else [],
        }

    def frame(self, grant: Permissions) -> bytes:
        """The same as a server-sent event, encoded once for all who see the same."""
        frame = self._frames.get(grant.view)
        if frame is None:
            frame = self._frames[grant.view] = b"data: %b\n\n" % _encode(self.shown(grant))
        return frame


class LiveStatistics:
    """Moments for those who listen; one task makes them, and it runs only while there is a listener."""

    def __init__(self, views: Views) -> None:
        self.views = views
        self._listeners: set[LiveListener] = set()
        self._last: StatsSnapshot | None = None
        self._ticking: asyncio.Task[None] | None = None

    def listen(self) -> LiveListener:
        """Moments from now on: `async with live.listen() as moments: async for moment in moments: …`."""
        return LiveListener(self)

    def join(self, listener: LiveListener) -> None:
        """One more listens."""
        if self._last is not None:
            listener.offer(self._last)
        self._listeners.add(listener)
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="zbus-web-live")

    def leave(self, listener: LiveListener) -> None:
        """One less."""
        self._listeners.discard(listener)
        if not self._listeners and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = self._last = None  # what is old says nothing about the next second

    async def _tick(self) -> None:
        try:
            while True:
                due = monotonic() + TICK_S
                await self.views.activity.follow()
                cursors = await of(self.views.bus).positions()
                self._last = StatsSnapshot(self.views, self.views.bus.stats(), cursors, self._last)
                for listener in self._listeners:
                    listener.offer(self._last)
                await asyncio.sleep(max(0.0, due - monotonic()))
        except ZbusError:  # the bus was closed, or its log cannot be read: there is nothing more to see
            for listener in self._listeners:
                listener.end()


class LiveListener:
    """One who looks. Only the last few moments wait for it."""

    def __init__(self, live: LiveStatistics) -> None:
        self._live = live
        self._waiting: deque[StatsSnapshot] = deque(maxlen=WAITING_MAX)
        self._wake = asyncio.Event()
        self._ended = False

    async def __aenter__(self) -> LiveListener:
        self._live.join(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._live.leave(self)

    def __aiter__(self) -> LiveListener:
        return self

    async def __anext__(self) -> StatsSnapshot:
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._waiting.popleft()

    def offer(self, moment: StatsSnapshot) -> None:
        """Let it have one more."""
        self._waiting.append(moment)
        self._wake.set()

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        self._wake.set()


class LiveStream:
    """Moments as a stream of server-sent events, for one client."""

    def __init__(self, live: LiveStatistics, grant: Permissions, retry_ms: int) -> None:
        self._listener, self._grant, self._retry_ms = live.listen(), grant, retry_ms

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """One frame a second."""
        yield b"retry: %d\n\n" % self._retry_ms
        async with self._listener as moments:
            async for moment in moments:
                yield moment.frame(self._grant)

    async def aclose(self) -> None:
        """Listen no longer."""
        await self._listener.__aexit__()

    def pulse(self) -> None:
        """It is never silent for long."""

    def end(self, reason: str | None) -> None:
        """End after what waits."""
        self._listener.end()


def _per_s(events: int, passed_s: float) -> float:
    return round(max(0, events) / passed_s, 1) if passed_s > 0 else 0.0


def _between(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, float | None]:
    """Quantiles of what was measured since; None where nothing was."""
    taken = Histogram()
    earlier = before["buckets"] if before is not None else now["buckets"]
    taken.buckets = [max(0, late - early) for late, early in zip(now["buckets"], earlier, strict=True)]
    if not taken.count:
        return {"p50": None, "p99": None}
    return {"p50": round(taken.quantile_us(0.5) / 1000, 3), "p99": round(taken.quantile_us(0.99) / 1000, 3)}
