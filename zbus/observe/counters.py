"""Counters of one transport, and throttled log records about bad input and failures.

A peer that sends malformed input all day must neither fill the log file nor go unnoticed. Every occurrence is therefore
counted, a record is written at most once per minute for each code and source, and the memory for sources is bounded.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

from zbus.util.runtime import REAL, Runtime

from .catalog import CODES
from .records import record_reason
from .throttle import Throttle

SOURCE_CHARACTERS_MAX = 200


class Counters:
    """Counters of one transport. Any thread may call it."""

    def __init__(self, transport: str, runtime: Runtime = REAL) -> None:
        self._transport = transport
        self._counts: Counter[str] = Counter()
        self._throttle = Throttle(monotonic=runtime.monotonic)
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        """Add to a counter without writing a record."""
        with self._lock:
            self._counts[name] += number

    def report(self, name: str, code: str, source: str, number: int = 1, **fields: Any) -> None:
        """Add to the counter `code`, and write the record `name` unless one was written for this code and source
        within the last minute. Its `reason` is the sentence in `catalog.CODES`.
        """
        source = source[:SOURCE_CHARACTERS_MAX]  # before the throttle, whose memory is bounded by it
        with self._lock:
            self._counts[code] += number
            total = self._counts[code]
            if not self._throttle.due((code, source)):
                return
        fields = {"transport": self._transport, "source": source, "count_total": total, **fields}
        record_reason(name, logging.WARNING, code=code, reason=CODES.get(code, code), **fields)

    def snapshot(self) -> dict[str, int]:
        """Return all counters, sorted by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))
