"""What was left out, refused or dropped: counted by reason, and reported at most once a minute for each source.

A flood of bad messages must not become a flood of log lines, and a single one must not go unseen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

from zbus.records import record

INPUT_REFUSED = "FABRIC_INPUT_REFUSED"
REPORT_S = 60.0
SOURCES_MAX = 1000


class Tally:
    """Counters that any thread may add to."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._counts: Counter[str] = Counter()
        self._reported: dict[tuple[str, str], float] = {}  # when
        self._lock = threading.Lock()

    def add(self, reason: str, source: str, detail: str, name: str = INPUT_REFUSED) -> None:
        """Count one, and report it unless this reason and source were reported within the minute."""
        now = time.monotonic()
        with self._lock:
            self._counts[reason] += 1
            total = self._counts[reason]
            last = self._reported.get((reason, source))
            if last is not None and now - last < REPORT_S:
                return
            if len(self._reported) >= SOURCES_MAX:
                self._reported.pop(next(iter(self._reported)))
            self._reported[reason, source] = now
        source, detail = source[:200], detail[:500]
        record(
            name,
            logging.WARNING,
            fabric=self._transport,
            reason=reason,
            source=source,
            detail=detail,
            count_total=total,
        )

    def counts(self) -> dict[str, int]:
        """Every reason so far, with its count."""
        with self._lock:
            return dict(self._counts)
