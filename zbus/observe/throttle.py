"""Throttle: let the same log message through at most once a minute. Counters still count every occurrence.

It also limits how often other work is done, such as looking at a file again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from zbus.util.runtime import REAL

EVERY_S = 60.0
KEYS_MAX = 1_000


class Throttle:
    """Allows one message per key every `every_s` seconds.

    At most `keys_max` messages are let through in that time, so a flood of different keys cannot fill a log file. For
    one thread at a time.

    >>> throttle = Throttle(60.0)
    >>> throttle.due("a"), throttle.due("a"), throttle.due("b")
    (True, False, True)
    """

    __slots__ = ("_every_s", "_keys_max", "_monotonic", "_passed_at")

    def __init__(
        self,
        every_s: float = EVERY_S,
        monotonic: Callable[[], float] = REAL.monotonic,
        keys_max: int = KEYS_MAX,
    ) -> None:
        self._every_s, self._monotonic, self._keys_max = every_s, monotonic, keys_max
        self._passed_at: OrderedDict[Hashable, float] = OrderedDict()  # the oldest first

    def due(self, key: Hashable = None) -> bool:
        """Return whether a message about `key` may be written now. If so, the next one has to wait."""
        now, passed_at = self._monotonic(), self._passed_at
        while passed_at and now - next(iter(passed_at.values())) >= self._every_s:
            passed_at.popitem(last=False)
        if key in passed_at or len(passed_at) >= self._keys_max:
            return False
        passed_at[key] = now
        return True
