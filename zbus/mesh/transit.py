"""Events that a bridge has received on one side and not yet sent on the other: how many, and since when.

The statistics of each direction show when a side is disconnected. Each batch is one entry with the position of its
last event. Adjacent entries are merged when there are many, so memory stays bounded during a long outage.
"""

from __future__ import annotations

from collections import deque

RUNS_MAX = 4096


class Transit:
    """The events in transit in one direction. Lives on the loop.

    >>> transit = Transit()
    >>> transit.entered(10, 10, 1_000), transit.entered(14, 2, 2_000)
    (None, None)
    >>> transit.after(0), transit.after(7), transit.after(10), transit.after(14)
    ((12, 1000), (5, 1000), (2, 2000), (0, None))
    """

    def __init__(self) -> None:
        self._runs: deque[tuple[int, int, int]] = deque()  # last position, number of events, time of the first
        self._events = 0

    def entered(self, last: int, events: int, published_at: int) -> None:
        """Add a batch of `events` events up to position `last`, the first of which was published at `published_at`."""
        if self._runs and last <= self._runs[-1][0]:
            return  # the log had them already
        self._runs.append((last, events, published_at))
        self._events += events
        if len(self._runs) > RUNS_MAX:
            runs = list(self._runs)
            pairs = zip(runs[::2], runs[1::2], strict=False)  # an odd one is left over
            self._runs = deque([(two[0], one[1] + two[1], one[2]) for one, two in pairs])
            self._runs.extend(runs[len(self._runs) * 2 :])

    def after(self, sent: int) -> tuple[int, int | None]:
        """Return how many events have a position above `sent`, and about when the oldest was published, or None.

        The count of a batch that was sent in part is an upper bound, because positions may have gaps.
        """
        while self._runs and self._runs[0][0] <= sent:
            self._events -= self._runs.popleft()[1]
        if not self._runs:
            return 0, None
        last, events, published_at = self._runs[0]
        return self._events - events + min(events, last - sent), published_at
