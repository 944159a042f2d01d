"""What went wrong, counted by reason, and told at most once a minute for each source.

A peer that sends rubbish can send a lot of it: every message is counted, few are written down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

from zbus.records import EVENT_DROPPED, EVENT_INVALID, record

REPORT_EVERY_S = 60.0
SOURCES_MAX = 1000


class Counts:
    """Counters of one fabric. Any thread."""

    def __init__(self, fabric: str) -> None:
        self._fabric = fabric
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._told: dict[tuple[str, str], float] = {}

    def add(self, reason: str, number: int = 1) -> None:
        """Count without a word."""
        with self._lock:
            self._counts[reason] += number

    def invalid(self, reason: str, source: str) -> None:
        """Count a message that was refused, and say so once a minute."""
        self._tell(EVENT_INVALID, reason, source, 1)

    def dropped(self, reason: str, source: str, number: int = 1) -> None:
        """Count messages that were not delivered to everybody who wants them, and say so once a minute."""
        self._tell(EVENT_DROPPED, reason, source, number)

    def trouble(self, name: str, reason: str, source: str, detail: str = "") -> None:
        """Count something else that went wrong, and say so once a minute under a record of its own."""
        self._tell(name, reason, source, 1, detail)

    def snapshot(self) -> dict[str, int]:
        """Everything counted so far."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def _tell(self, name: str, reason: str, source: str, number: int, detail: str = "") -> None:
        now = time.monotonic()
        with self._lock:
            self._counts[reason] += number
            total = self._counts[reason]
            if now - self._told.get((reason, source), -REPORT_EVERY_S) < REPORT_EVERY_S:
                return
            if len(self._told) >= SOURCES_MAX:
                self._told.clear()
            self._told[reason, source] = now
        fields = {"fabric": self._fabric, "reason": reason, "source": source, "total": total}
        record(name, logging.WARNING, None, **fields, **({"detail": detail} if detail else {}))
