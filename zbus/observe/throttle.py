"""What was told a short while ago: who says the same again and again fills a log file, and nobody reads it."""

from __future__ import annotations

import time
from collections.abc import Hashable

TELL_EVERY_S = 60.0
TOLD_MAX = 1_000


class Told:
    """Lets a thing be told once a minute. Bounded: of a flood of things some are named; counting is another matter.

    >>> told = Told()
    >>> told.is_due("a"), told.is_due("a"), told.is_due("b")
    (True, False, True)
    """

    def __init__(self) -> None:
        self._at: dict[Hashable, float] = {}  # the longest ago first

    def is_due(self, thing: Hashable) -> bool:
        """Whether to tell of it now; from now on it was told."""
        now = time.monotonic()
        while self._at:
            oldest, at = next(iter(self._at.items()))
            if now - at < TELL_EVERY_S:
                break
            del self._at[oldest]
        if thing in self._at or len(self._at) >= TOLD_MAX:
            return False
        self._at[thing] = now
        return True
