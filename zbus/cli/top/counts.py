"""Counts that become rates: of keys, of which there may be any number, and of anything that only grows."""

from __future__ import annotations

import time
from collections import Counter

from .frame import KeyRate

KEYS_MAX = 10_000
OTHERS = "(others)"  # no key holds a bracket and blank space, but people see what is meant
SMOOTHING = 0.5  # how much the newest interval weighs: busy keys stay in place for a moment


class KeyCounts:
    """How many events each key had. Of what is beyond `KEYS_MAX` keys only the sum is kept."""

    def __init__(self) -> None:
        self._events: Counter[str] = Counter()
        self._before: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self.seen = 0

    def add(self, key: str) -> None:
        """One more event."""
        self.seen += 1
        self._events[key if key in self._events or len(self._events) < KEYS_MAX else OTHERS] += 1

    def top(self, number: int, elapsed_s: float) -> tuple[KeyRate, ...]:
        """The busiest keys of the time since this was asked last, with their rates; then those with most events."""
        for key, events in self._events.items():
            now = (events - self._before.get(key, 0)) / elapsed_s
            before = self._rates.get(key, now)
            self._rates[key] = rate if (rate := before + (now - before) * SMOOTHING) >= 0.05 else 0.0
        self._before = dict(self._events)
        busiest = sorted(self._events, key=lambda key: (-self._rates[key], -self._events[key], key))[:number]
        return tuple(KeyRate(key, self._events[key], round(self._rates[key], 1)) for key in busiest)


class Rate:
    """A counter, seen now and then, as a number a second. The first look tells nothing yet.

    >>> rate = Rate()
    >>> rate.per_s(10, 5.0), rate.per_s(30, 7.0), rate.per_s(3, 8.0)
    (None, 10.0, 0.0)
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def per_s(self, value: int, now_s: float | None = None) -> float | None:
        """How fast it grew since it was seen last; a counter that began anew did not grow."""
        now_s = time.monotonic() if now_s is None else now_s
        last, self._last = self._last, (value, now_s)
        if last is None or now_s <= last[1]:
            return None
        return round(max(0, value - last[0]) / (now_s - last[1]), 1)
