"""How often each client may ask: a bucket for each that fills at a rate, and is emptied by requests."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from zbus.util.memo import Memo

CLIENTS_MAX = 10_000  # buckets that are kept; the one that was not used for longest is forgotten, and is full again


class Rates:
    """Token buckets by the name of a client.

    >>> now = [0.0]
    >>> rates = Rates(per_s=2, burst=2, clock=lambda: now[0])
    >>> [rates.take("a"), rates.take("a"), rates.take("a"), rates.take("b")]
    [0.0, 0.0, 0.5, 0.0]
    """

    def __init__(
        self,
        per_s: float,
        burst: int,
        clients_max: int = CLIENTS_MAX,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._per_s, self._burst, self._clock = per_s, float(burst), clock
        self._left = Memo[str, tuple[float, float]](clients_max)  # what is in the bucket, and when that was

    def __len__(self) -> int:
        return len(self._left)

    def take(self, client: str) -> float:
        """0 if a request may be made now, and it was; otherwise how many seconds to wait."""
        now = self._clock()
        left, at = self._left.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_s)
        may = left >= 1.0
        self._left[client] = (left - 1.0 if may else left, now)
        return 0.0 if may else (1.0 - left) / self._per_s
