"""What beacons told of publishers whose events this node records: the highest sequence of each that was sent.

A log cannot show that the last events of a publisher are missing, since nothing comes after them. Where its node
went away before they could be asked for, this is all that tells of them.
"""

from __future__ import annotations

from zbus.util.memo import Memo
from zbus.util.runtime import Runtime
from zbus.wire.beacon import Beacon

from .interest import Interest

PUBLISHERS_MAX = 100_000
BEACON_NS = 2_000_000_000  # what a beacon names was sent less long ago


class SequenceMarks:
    """Lives on the loop. Numbers are one more than a sequence, so that the first event counts too.

    >>> marks = SequenceMarks(Runtime())
    >>> marks.remember(7, 3), marks.remember(7, 2), marks.take(), marks.take()
    (None, None, {7: 3}, {})
    """

    def __init__(self, runtime: Runtime) -> None:
        self._time_ns = runtime.time_ns
        self._next = Memo[int, int](PUBLISHERS_MAX)  # by publisher, the one named longest ago first
        self._changed: dict[int, int] = {}

    def load(self, publisher_id: int, number: int) -> None:
        """What was known before this process began."""
        self.remember(publisher_id, number)
        self._changed.pop(publisher_id, None)

    def note_beacon(self, beacon: Beacon, interest: Interest) -> None:
        """Note the newest event of each key that our log records, and did already when that event was sent."""
        if not interest.stores_any:
            return
        before = self._time_ns() - BEACON_NS
        for key, (_, publisher_id, sequence) in beacon.newest.items():
            wanted = interest.of(key)
            if wanted.stored and wanted.since <= before:
                self.remember(publisher_id, sequence + 1)

    def remember(self, publisher_id: int, number: int) -> None:
        """Note a number, unless a higher one is known."""
        known = self._next.pop(publisher_id, 0)
        self._next[publisher_id] = max(known, number)
        if number > known:
            self._changed[publisher_id] = number

    def take(self) -> dict[int, int]:
        """What changed since the last time."""
        taken, self._changed = self._changed, {}
        return taken
