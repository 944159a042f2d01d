"""Rate limits per client: a token bucket for each."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from zbus.util.memo import Memo

CLIENTS_MAX = 10_000  # Buckets in memory. The least recently used one is evicted, and starts full again.


class Rates:
    """Token buckets by client name.

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
        self._left = Memo[str, tuple[float, float]](clients_max)  # tokens in the bucket, and when they were counted

    def __len__(self) -> int:
        return len(self._left)

    def take(self, client: str) -> float:
        """Take a token and return 0, or return the number of seconds to wait if the bucket is empty."""
        now = self._clock()
        left, at = self._left.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_s)
        allowed = left >= 1.0
        self._left[client] = (left - 1.0 if allowed else left, now)
        return 0.0 if allowed else (1.0 - left) / self._per_s
