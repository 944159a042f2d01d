"""What a bus counts and measures, in one place: `bus.stats()`, and what Prometheus is shown, are made from it.

Counting is per burst, and nothing is worked out before somebody asks.
"""

from __future__ import annotations

import threading
from collections import Counter

from .histogram import Histogram


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
