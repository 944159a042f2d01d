"""Deduplication of received events by identity, in bounded memory.

The sequences of a publisher rise, so a sequence above the highest one seen is new. Sequences that were skipped may
still arrive over another link. They are kept in a window that is bounded by age and by number.
"""

from __future__ import annotations

from zbus.util.memo import Memo
from zbus.util.runtime import Runtime
from zbus.util.window import Window

PUBLISHERS_MAX = 100_000
SKIPPED_MAX = 100_000
SKIPPED_AT_ONCE_MAX = 4096
WINDOW_S = 120.0


class Dedup:
    """The identities that were received. Not thread-safe.

    >>> seen = Dedup(Runtime())
    >>> seen.first_time(7, 0), seen.first_time(7, 0), seen.first_time(7, 2), seen.first_time(7, 1)
    (True, False, True, True)
    """

    def __init__(self, runtime: Runtime) -> None:
        self._last = Memo[int, list[int]](PUBLISHERS_MAX, lambda _: [])  # the highest sequence; empty at first
        self._skipped = Window[tuple[int, int]](SKIPPED_MAX, WINDOW_S, runtime.monotonic)

    def last(self, publisher_id: int) -> int | None:
        """Return the highest sequence received from a publisher, or None."""
        last = self._last.get(publisher_id)
        return last[0] if last else None

    def first_time(self, publisher_id: int, sequence: int) -> bool:
        """Return whether this identity is new, and remember it."""
        mark = self._last[publisher_id]
        if not mark:
            mark.append(sequence)
            return True
        last = mark[0]
        if sequence <= last:
            return self._skipped.remove((publisher_id, sequence))
        if sequence > last + 1:
            for skipped in range(max(last + 1, sequence - SKIPPED_AT_ONCE_MAX), sequence):
                self._skipped.add((publisher_id, skipped))
        mark[0] = sequence
        return True

    def forget(self, publisher_id: int, sequence: int) -> None:
        """Make an identity new again, for `WINDOW_S` at most, because its event was neither stored nor delivered."""
        self._skipped.add((publisher_id, sequence))
