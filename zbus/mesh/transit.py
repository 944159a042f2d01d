"""What entered a bridge on one side and has not left on the other: how much, and since when.

A side that is away must show, and for each direction apart. Every burst is noted with the number of its last
event, once; neighbours are joined where they are many, so that an hour away costs no memory.
"""

from __future__ import annotations

from collections import deque

RUNS_MAX = 4096


class Transit:
    """Of one direction. Lives on the loop.

    >>> transit = Transit()
    >>> transit.entered(10, 10, 1_000), transit.entered(14, 2, 2_000)
    (None, None)
    >>> transit.after(0), transit.after(7), transit.after(10), transit.after(14)
    ((12, 1000), (5, 1000), (2, 2000), (0, None))
    """

    def __init__(self) -> None:
        self._runs: deque[tuple[int, int, int]] = deque()  # the last number, how many, when the first was published
        self._events = 0

    def entered(self, last: int, events: int, published_at: int) -> None:
        """So many events were numbered, up to `last`; the first of them was published then."""
        if self._runs and last <= self._runs[-1][0]:
            return  # what was there already
        self._runs.append((last, events, published_at))
        self._events += events
        if len(self._runs) > RUNS_MAX:
            runs = list(self._runs)
            pairs = zip(runs[::2], runs[1::2], strict=False)  # one is left over
            self._runs = deque([(two[0], one[1] + two[1], one[2]) for one, two in pairs])
            self._runs.extend(runs[len(self._runs) * 2 :])

    def after(self, sent: int) -> tuple[int, int | None]:
        """How many wait that have a number over `sent`, and when the oldest of them was published, about.

        Of a run that was sent in part it is the most that it can be: numbers may have gaps.
        """
        while self._runs and self._runs[0][0] <= sent:
            self._events -= self._runs.popleft()[1]
        if not self._runs:
            return 0, None
        last, events, published_at = self._runs[0]
        return self._events - events + min(events, last - sent), published_at
