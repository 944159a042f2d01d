"""Frames of `zbus top` from a bus in this process, which follows a log or receives from a transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime

import zbus
from zbus.deliver.subscriber import EventSubscriber
from zbus.errors import SubscriberLagged
from zbus.introspection import of
from zbus.observe.histogram import Histogram

from .counts import KeyCounts, Rate
from .frame import CursorLag, Frame, NodeSeen, Quantiles, dropped_of

QUEUE_EVENTS = 50_000
TOPICS_MAX = 50


class BusFrames:
    """Counts received events, and yields one frame per interval."""

    def __init__(self, bus: zbus.Bus, source: str, interval_s: float) -> None:
        self._bus, self._source, self._interval_s = bus, source, interval_s
        self._keys, self._taken = KeyCounts(), Histogram()
        self._published, self._dropped = Rate(), Rate()
        self._began = 0

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Yield one frame per interval until the caller closes the generator."""
        async with self._bus as bus, bus.subscribe("**", queue_events=QUEUE_EVENTS) as subscriber:
            counting = asyncio.create_task(self._count(subscriber))
            try:
                self._began = of(bus).head
                self._published.per_s(self._stored_since(self._began))
                while True:
                    begun = time.monotonic()
                    await asyncio.wait((counting,), timeout=self._interval_s)
                    if counting.done():
                        counting.result()  # raises the error of the subscription
                        return
                    yield await self._frame(time.monotonic() - begun)
            finally:
                counting.cancel()
                with suppress(asyncio.CancelledError):
                    await counting

    async def _count(self, subscriber: EventSubscriber) -> None:
        while True:
            try:
                event = await subscriber.next()
            except SubscriberLagged as gap:
                self._keys.seen += gap.missed
                continue
            if event is None:
                return
            self._keys.add(event.key)
            self._taken.add(time.time_ns() - event.published_at)

    def _stored_since(self, head: int) -> int:
        """Return how many events were stored since `frames` started."""
        log = of(self._bus).reader.log
        return log.count(self._began, head) if log is not None else self._keys.seen

    async def _frame(self, elapsed_s: float) -> Frame:
        bus = self._bus
        head = await bus.head() if bus.config.log is not None else None
        published = self._stored_since(head or 0)
        stats = bus.stats()
        dropped = dropped_of(stats)
        taken, self._taken = self._taken, Histogram()
        is_live = not bus.config.read_only
        return Frame(
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            source=self._source,
            head=head,
            log_bytes=stats["log"]["bytes"] if "log" in stats else None,
            published=published,
            published_per_s=self._published.per_s(published),
            dropped=dropped if is_live else None,
            dropped_per_s=(self._dropped.per_s(dropped) or 0.0) if is_live else None,
            delivery_ms=_milliseconds(taken),
            topics=self._keys.top(TOPICS_MAX, elapsed_s),
            cursors=tuple(CursorLag(name, lag) for name, lag in stats.get("cursors", {}).items()),
            nodes=tuple(
                NodeSeen(node.name, node.alive, node.has_log, node.transport)
                for node in bus.nodes()
                if not node.is_self
            ),
        )


def _milliseconds(taken: Histogram) -> Quantiles | None:
    if not taken.count:
        return None
    return Quantiles(*(round(taken.quantile_us(share) / 1000, 2) for share in (0.5, 0.99)))
