"""What went wrong, counted by reason, and reported once per source and minute.

A program that sends rubbish all day must neither fill the log file nor go unnoticed.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from zbus.records import record

FABRIC_CONNECTED = "FABRIC_CONNECTED"
FABRIC_DISCONNECTED = "FABRIC_DISCONNECTED"
FABRIC_RECONNECTED = "FABRIC_RECONNECTED"
FABRIC_INPUT_REFUSED = "FABRIC_INPUT_REFUSED"
FABRIC_DENIED = "FABRIC_DENIED"

REPORT_EVERY_S = 60.0
SOURCES_MAX = 1_000


class Counts:
    """Counters by reason. Any thread may add."""

    def __init__(self, fabric: str) -> None:
        self._fabric = fabric
        self._counts: dict[str, int] = {}
        self._reported: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def add(self, reason: str, source: str, name: str = FABRIC_INPUT_REFUSED, **fields: Any) -> None:
        """Count one, and report it unless this source was reported for the same reason within the last minute."""
        now = time.monotonic()
        with self._lock:
            total = self._counts[reason] = self._counts.get(reason, 0) + 1
            last = self._reported.get((reason, source))
            if last is not None and now - last < REPORT_EVERY_S:
                return
            if len(self._reported) >= SOURCES_MAX and not self._forget(now):
                return  # a flood of sources: counted, and enough of them were named within this minute
            self._reported[reason, source] = now
        record(
            name, logging.WARNING, fabric=self._fabric, reason=reason, source=source[:200], count_total=total, **fields
        )

    def note(self, reason: str) -> None:
        """Count what is normal and reported nowhere."""
        with self._lock:
            self._counts[reason] = self._counts.get(reason, 0) + 1

    def snapshot(self) -> dict[str, int]:
        """The counters now."""
        with self._lock:
            return dict(self._counts)

    def _forget(self, now: float) -> bool:
        old = [each for each, at in self._reported.items() if now - at >= REPORT_EVERY_S]
        for each in old:
            del self._reported[each]
        return bool(old)
