"""How far the clock of a peer is ahead of the clock of this node, as the replies of its log show."""

from __future__ import annotations

from collections.abc import Callable


class ClockSkew:
    """The skew of one peer.

    >>> skew = ClockSkew(lambda: 1000)
    >>> skew.measure(1300, asked_at=900), skew.ns
    (None, 300)
    >>> skew.measure(950, asked_at=900), skew.ns
    (None, 0)
    """

    def __init__(self, time_ns: Callable[[], int]) -> None:
        self._time_ns = time_ns
        self.is_known = False
        self.ns = 0  # how far it is ahead, at least

    def measure(self, now_ns: int, asked_at: int) -> None:
        """Note the time of its clock in a reply. A difference of less than the time of a round trip is not a skew."""
        self.is_known = True
        if now_ns:  # version 0.1 does not say
            least, most = now_ns - self._time_ns(), now_ns - asked_at
            self.ns = 0 if least <= 0 <= most else least
