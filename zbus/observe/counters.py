"""What went wrong at a fabric: counted by reason, told once per source and minute.

A program that sends rubbish all day must neither fill the log file nor go unnoticed. So everything is
counted, the first of each source is written down, and what is remembered of sources is bounded.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

from zbus.util.runtime import REAL, Runtime

from .records import record
from .throttle import Throttle

SOURCE_CHARACTERS_MAX = 200


class Counters:
    """Counters of one fabric. Any thread."""

    def __init__(self, transport: str, runtime: Runtime = REAL) -> None:
        self._transport = transport
        self._counts: Counter[str] = Counter()
        self._throttle = Throttle(monotonic=runtime.monotonic)
        self._lock = threading.Lock()

    def note(self, reason: str, number: int = 1) -> None:
        """Count without a word."""
        with self._lock:
            self._counts[reason] += number

    def tell(self, name: str, reason: str, source: str, number: int = 1, **fields: Any) -> None:
        """Count, and write the record unless this source was told for this reason within the last minute."""
        source = source[:SOURCE_CHARACTERS_MAX]  # here already: what is remembered is bounded as well
        with self._lock:
            self._counts[reason] += number
            total = self._counts[reason]
            if not self._throttle.due((reason, source)):
                return
        fields = {"transport": self._transport, "reason": reason, "source": source, "count_total": total, **fields}
        record(name, logging.WARNING, **fields)

    def snapshot(self) -> dict[str, int]:
        """Everything counted so far, by reason."""
        with self._lock:
            return dict(sorted(self._counts.items()))
