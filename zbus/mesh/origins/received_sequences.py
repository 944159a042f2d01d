"""Up to which sequence the events of each publisher are stored here, kept over a restart.

After a restart, a gap whose events the publisher's retention has removed would begin at the first sequence, although
earlier events were received. The numbers are stored when a node closes and hold for the next process only. After a
crash they are unknown, and such a gap is reported with the events that were received.
"""

from __future__ import annotations

from zbus.util.memo import Memo

PUBLISHERS_MAX = 10_000  # the one whose events were stored longest ago is forgotten first
RECEIVED_KIND = "received"


class ReceivedSequences:
    """The sequences of all publishers. Lives on the loop; `names` may be called on any thread.

    >>> received = ReceivedSequences()
    >>> received.stored(7, 3), received.stored(7, 2), received.until(7), received.until(8), received.names()
    (None, None, 3, -1, {'received/7': 3})
    """

    def __init__(self) -> None:
        self._until = Memo[int, int](PUBLISHERS_MAX)

    def load(self, name: str, value: int) -> bool:
        """Take over a stored name. Returns False if it is of another kind."""
        kind, _, publisher_id = name.partition("/")
        if kind == RECEIVED_KIND:
            self._until[int(publisher_id, 16)] = value
        return kind == RECEIVED_KIND

    def names(self) -> dict[str, int]:
        """Return everything as it is stored."""
        return {f"{RECEIVED_KIND}/{publisher_id:x}": until for publisher_id, until in list(self._until.items())}

    def forget(self) -> None:
        """Forget all of them: the log of this node does not have these events."""
        self._until.clear()

    def stored(self, publisher_id: int, until: int) -> None:
        """Note that the events of a publisher up to a sequence are stored. -1 means that it is unknown."""
        if until >= 0:
            self._until[publisher_id] = max(until, self.until(publisher_id))
            self._until.move_to_end(publisher_id)

    def until(self, publisher_id: int) -> int:
        """Return the sequence up to which the events of a publisher are stored; -1 if that is unknown."""
        return self._until.get(publisher_id, -1)
