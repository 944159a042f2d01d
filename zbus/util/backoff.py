"""Exponential backoff with jitter.

It only computes pauses and never sleeps, so threads, event loops and a simulator can use the same class.
"""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """The pauses between attempts: each is twice the previous one, up to `max_s`.

    A pause is shortened by a random part of up to `jitter`, so that nodes do not retry in step after an outage.

    >>> backoff = Backoff(0.5, 2.0, jitter=0.0)
    >>> [backoff.next() for _ in range(4)]
    [0.5, 1.0, 2.0, 2.0]
    """

    def __init__(
        self,
        first_s: float,
        max_s: float,
        jitter: float = 0.5,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first_s, self._max_s, self._jitter, self._uniform = first_s, max_s, jitter, uniform
        self._pause_s = first_s

    def next(self) -> float:
        """Return the pause in seconds before the next attempt."""
        pause_s = self._pause_s
        self._pause_s = min(self._max_s, pause_s * 2)
        return pause_s * self._uniform(1.0 - self._jitter, 1.0)

    def reset(self) -> None:
        """Start again with the first pause, after a successful attempt."""
        self._pause_s = self._first_s
