"""High-water marks from beacons: the highest sequence sent by each publisher whose events this node stores.

A log cannot show that the last events of a publisher are missing, because nothing follows them. If the publisher's node
disconnects before they can be requested, only these marks reveal the loss.
"""

from __future__ import annotations

from zbus.event import NUMBER_MAX
from zbus.mesh.interest import Interest
from zbus.util.memo import Memo
from zbus.util.runtime import Runtime
from zbus.wire.beacon import Beacon

PUBLISHERS_MAX = 100_000
BEACON_NS = 2_000_000_000  # a beacon names events that were sent less than this long ago


class SequenceMarks:
    """The marks of all publishers. Lives on the loop.

    A mark is the sequence plus one, so that 0 means that no event was sent. For the highest possible sequence it is
    that sequence, because a log cannot store a higher number.

    >>> marks = SequenceMarks(Runtime())
    >>> marks.remember(7, 3), marks.remember(7, 2), marks.take(), marks.take()
    (None, None, {7: 3}, {})
    """

    def __init__(self, runtime: Runtime) -> None:
        self._time_ns = runtime.time_ns
        # By publisher; the least recently named one comes first.
        self._next = Memo[int, int](PUBLISHERS_MAX, on_evict=lambda publisher_id, _: self._forget(publisher_id))
        self._changed: dict[int, int] = {}

    def load(self, publisher_id: int, number: int) -> None:
        """Restore a mark that an earlier process stored."""
        self.remember(publisher_id, number)
        self._changed.pop(publisher_id, None)

    def note_beacon(self, beacon: Beacon, interest: Interest) -> None:
        """Raise the marks for the keys that this node stores, if it already did when the named events were sent."""
        if not interest.stores_any:
            return
        before = self._time_ns() - BEACON_NS
        for key, (_, publisher_id, sequence) in beacon.newest.items():
            wanted = interest.of(key)
            if wanted.stored and wanted.since <= before:
                self.remember(publisher_id, min(sequence + 1, NUMBER_MAX))

    def remember(self, publisher_id: int, number: int) -> None:
        """Raise the mark of a publisher to `number`, unless it is higher."""
        known = self._next.pop(publisher_id, 0)
        self._next[publisher_id] = max(known, number)
        if number > known:
            self._changed[publisher_id] = number

    def _forget(self, publisher_id: int) -> None:
        self._changed[publisher_id] = 0

    def take(self) -> dict[int, int]:
        """Return the marks that changed since the last call. Those that were forgotten are 0."""
        taken, self._changed = self._changed, {}
        return taken
