"""Rates from counters: per key, with a limit on the number of keys, and for any single counter."""

from __future__ import annotations

import time
from collections import Counter

from .frame import KeyRate

KEYS_MAX = 10_000
OTHERS = "(others)"  # events on a key with this name are counted with the others
SMOOTHING = 0.5  # weight of the newest interval; without it, keys would change places in every frame


class KeyCounts:
    """Event counts per key. Events of further keys than `KEYS_MAX` are counted as one sum."""

    def __init__(self) -> None:
        self._events: Counter[str] = Counter()
        self._before: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self.seen = 0

    def add(self, key: str) -> None:
        """Count one event."""
        self.seen += 1
        self._events[key if key in self._events or len(self._events) < KEYS_MAX else OTHERS] += 1

    def top(self, number: int, elapsed_s: float) -> tuple[KeyRate, ...]:
        """Return the `number` busiest keys since the previous call, then those with most events, with their rates."""
        for key, events in self._events.items():
            now = (events - self._before.get(key, 0)) / elapsed_s
            before = self._rates.get(key, now)
            self._rates[key] = rate if (rate := before + (now - before) * SMOOTHING) >= 0.05 else 0.0
        self._before = dict(self._events)
        busiest = sorted(self._events, key=lambda key: (-self._rates[key], -self._events[key], key))[:number]
        return tuple(KeyRate(key, self._events[key], round(self._rates[key], 1)) for key in busiest)


class Rate:
    """The rate of a counter per second. The first reading has no rate.

    >>> rate = Rate()
    >>> rate.per_s(10, 5.0), rate.per_s(30, 7.0), rate.per_s(3, 8.0)
    (None, 10.0, 0.0)
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def per_s(self, value: int, now_s: float | None = None) -> float | None:
        """Return the growth per second since the previous reading. A counter that was reset has not grown."""
        now_s = time.monotonic() if now_s is None else now_s
        last, self._last = self._last, (value, now_s)
        if last is None or now_s <= last[1]:
            return None
        return round(max(0, value - last[0]) / (now_s - last[1]), 1)
