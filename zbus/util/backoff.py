"""Pauses between attempts: each twice as long as the one before, up to a limit, and jittered.

After an outage, clients without jitter try again in step and overload what has just come back.
"""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """The pauses of one caller. It never sleeps, so a thread, an event loop and a simulator use it alike.

    A pause is up to `jitter` (a share, 0 to 1) shorter than its full length, and never longer than `max_s`.

    >>> pauses = Backoff(0.1, 0.3, jitter=0)
    >>> pauses.next(), pauses.next(), pauses.next(), pauses.reset(), pauses.next()
    (0.1, 0.2, 0.3, None, 0.1)
    """

    __slots__ = ("_first_s", "_jitter", "_max_s", "_pause_s", "_uniform")

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
        """Return how many seconds to wait before the next attempt."""
        pause_s = min(self._max_s, self._pause_s)
        self._pause_s = pause_s * 2
        return pause_s * self._uniform(1.0 - self._jitter, 1.0)

    def reset(self) -> None:
        """Start again with the shortest pause: an attempt succeeded."""
        self._pause_s = self._first_s
