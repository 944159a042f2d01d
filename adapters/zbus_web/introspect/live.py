"""Live statistics of the bus, computed once a second for all listeners, and only while there is a listener."""

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
from zbus_web.http.streams import EndReason

from .views import Views, shown_cursors

TICK_S = 1.0
TOPICS = 50
QUEUE_SNAPSHOTS = 10  # for one listener; a slower listener misses the oldest ones
_encode = msgspec.json.Encoder().encode


class StatsSnapshot:
    """The state of the bus at one time, and the changes since the snapshot before."""

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
            f"{name}_ms": _between(earlier.get("latency", {}).get(name), histogram)
            for name, histogram in stats.get("latency", {}).items()
            if name in ("commit", "delivery")
        }
        kept = views.activity.log_records
        seen: int = before.record if before is not None else kept.last
        self._log_records = kept.after(seen)
        self.record: int = self._log_records[-1]["id"] if self._log_records else seen

    def shown(self, permissions: Permissions) -> dict[str, Any]:
        """Return the part of the snapshot that a client with these permissions may see."""
        return {
            "at": self.at.isoformat(timespec="milliseconds"),
            "stats": self.stats,
            "topics": self._views.topics(permissions, TOPICS),
            "rates": self.rates,
            "latency": self.latency,
            "subscriptions": self._views.subscriptions(permissions),
            "cursors": shown_cursors(permissions, self._cursors),
            "nodes": self._views.nodes(permissions),
            "log_records": self._log_records if permissions.sees_all else [],
        }

    def frame(self, permissions: Permissions) -> bytes:
        """Return that part as a server-sent event, encoded once for all clients with an equal view."""
        frame = self._frames.get(permissions.view)
        if frame is None:
            frame = self._frames[permissions.view] = b"data: %b\n\n" % _encode(self.shown(permissions))
        return frame


class LiveStatistics:
    """Snapshots for listeners. One task makes them, and it runs only while there is a listener."""

    def __init__(self, views: Views) -> None:
        self.views = views
        self._listeners: set[LiveListener] = set()
        self._last: StatsSnapshot | None = None
        self._ticking: asyncio.Task[None] | None = None

    def listen(self) -> LiveListener:
        """Return a listener: `async with live.listen() as snapshots: async for snapshot in snapshots: …`."""
        return LiveListener(self)

    def join(self, listener: LiveListener) -> None:
        """Add a listener, and start the task if it is the first one."""
        if self._last is not None:
            listener.offer(self._last)
        self._listeners.add(listener)
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="zbus-web-live")

    def leave(self, listener: LiveListener) -> None:
        """Remove a listener, and stop the task if it was the last one."""
        self._listeners.discard(listener)
        if not self._listeners and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = self._last = None  # Rates since an old snapshot would be wrong.

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
        except ZbusError:  # The bus was closed, or its log cannot be read.
            for listener in self._listeners:
                listener.end()


class LiveListener:
    """One listener. It queues the last `QUEUE_SNAPSHOTS` snapshots."""

    def __init__(self, live: LiveStatistics) -> None:
        self._live = live
        self._queue: deque[StatsSnapshot] = deque(maxlen=QUEUE_SNAPSHOTS)
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
        while not self._queue:
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._queue.popleft()

    def offer(self, snapshot: StatsSnapshot) -> None:
        """Queue a snapshot; the oldest one is dropped if the queue is full."""
        self._queue.append(snapshot)
        self._wake.set()

    def end(self) -> None:
        """End the iteration after the queued snapshots."""
        self._ended = True
        self._wake.set()


class LiveStream:
    """Snapshots as a stream of server-sent events for one client."""

    def __init__(self, live: LiveStatistics, permissions: Permissions, retry_ms: int) -> None:
        self._listener, self._permissions, self._retry_ms = live.listen(), permissions, retry_ms

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield one frame a second."""
        yield b"retry: %d\n\n" % self._retry_ms
        async with self._listener as snapshots:
            async for snapshot in snapshots:
                yield snapshot.frame(self._permissions)

    async def aclose(self) -> None:
        """Remove the listener."""
        await self._listener.__aexit__()

    def pulse(self) -> None:
        """Do nothing: the stream sends a frame every second."""

    def end(self, reason: EndReason | None) -> None:
        """End after the queued snapshots. `reason` is not sent."""
        self._listener.end()


def _per_s(events: int, passed_s: float) -> float:
    return round(max(0, events) / passed_s, 1) if passed_s > 0 else 0.0


def _between(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, float | None]:
    """Return the quantiles of the measurements since `before`, or None for each if there are none."""
    taken = Histogram()
    earlier = before["buckets"] if before is not None else now["buckets"]
    taken.buckets = [max(0, late - early) for late, early in zip(now["buckets"], earlier, strict=True)]
    if not taken.count:
        return {"p50": None, "p99": None}
    return {"p50": round(taken.quantile_us(0.5) / 1000, 3), "p99": round(taken.quantile_us(0.99) / 1000, 3)}
