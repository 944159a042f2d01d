"""Counters and latency histograms of one bus. `bus.stats()` and the Prometheus collector both read from here.

Events are counted per burst, and everything else is computed when it is read.
"""

from __future__ import annotations

import threading
from collections import Counter

from .histogram import Histogram


class Stats:
    """Counters and histograms of one bus. Any thread may call `count` and `counts`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.commit = Histogram()  # from handing a batch to the log until it is durable
        self.delivery = Histogram()  # from an event's `published_at` until it is in its subscription queues

    def count(self, name: str, events: int) -> None:
        """Add `events` to a counter."""
        if events:
            with self._lock:
                self._counts[name] += events

    def counts(self) -> dict[str, int]:
        """Return a copy of the counters."""
        with self._lock:
            return dict(self._counts)
