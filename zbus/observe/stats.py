"""What a bus counts and measures, in one place: `bus.stats()`, and what Prometheus is shown, are made from it.

Counting is per burst, and nothing is worked out before somebody asks.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .histogram import Histogram

if TYPE_CHECKING:
    from zbus.node import Engine

CURSORS_MAX = 100  # the furthest behind first


class Stats:
    """Counters and histograms of one bus. `count` may be called on any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.commit = Histogram()  # from handing a burst to the log until it is durable
        self.end_to_end = Histogram()  # from an event's `published_at` until it is in the queues of its readers

    def count(self, name: str, events: int) -> None:
        """Add to a counter."""
        if events:
            with self._lock:
                self._counts[name] += events

    def counts(self) -> dict[str, int]:
        """The counters so far."""
        with self._lock:
            return dict(self._counts)


def snapshot(bus: Engine) -> dict[str, Any]:
    """Everything that `bus.stats()` tells. Reads memory, and the sizes of files: it never waits for the log."""
    delivery, network = bus.delivery, bus.network
    found: dict[str, Any] = {
        **bus.figures.counts(),
        "published": bus.published_events,
        "delivered": delivery.deliveries,
        "backpressure": bus.gate.closings,
        "subscribers": len(bus.subscriptions),
    }
    queued = [each.queued for each in bus.subscriptions]
    found["queues"] = {"events": sum(queued), "events_max": max(queued, default=0)}
    found["readers_behind"] = sum(not each.is_live for each in bus.subscriptions)
    if bus.config.metrics:
        found["latency"] = {
            "commit": bus.figures.commit.snapshot(),
            "end_to_end": bus.figures.end_to_end.snapshot(),
        }
    if bus.log is not None:
        found["log"] = {"head": delivery.delivered, "bytes": _size(bus.log.path)}
        found["cursors"] = _cursors(bus)
    if network is not None and network.links:
        found["links"] = {
            link.label: {
                "fabric": link.fabric.name,
                "sent": link.send_queue.sent_events,
                "received": network.inbox.received.get(link.label, 0),
                "waiting": link.send_queue.waiting,
            }
            for link in network.links
        }
        found["nodes"] = sum(node.present for node in network.registry.nodes())
    return found


def _cursors(bus: Engine) -> dict[str, int]:
    """How many events each durable name has before it; of those read here, as of now."""
    head = bus.delivery.delivered
    at = {cursor.name: cursor.offset for cursor in bus.cursors_known}
    for each in bus.subscriptions:
        if each.durable is not None and (acknowledged := each.acknowledged) is not None:
            at[each.durable] = acknowledged
    lags = {name: max(0, head - offset) for name, offset in at.items()}
    return dict(sorted(lags.items(), key=lambda item: (-item[1], item[0]))[:CURSORS_MAX])


def _size(path: str) -> int:
    """The log's file and its write-ahead log."""
    total = 0
    for each in (path, f"{path}-wal"):
        try:
            total += Path(each).stat().st_size
        except OSError:
            pass  # gone this moment, or not there yet
    return total
