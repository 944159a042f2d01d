"""The entries of a cache: a moka cache with checked limits, and counters of hits, misses and evictions.

A read should cost little more than moka's own, so it is a closure over moka's `get` and the counters rather than a
method. moka's listener counts evictions. It refers only to the counters, because moka is opaque to Python's garbage
collector and a cycle through it would never be freed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from moka_py import Moka

from zbus import ConfigInvalid

if TYPE_CHECKING:
    from zbus.ports.cache import Limits

MISSING: Any = object()
SECONDS_MAX = 100 * 365 * 86_400  # moka accepts at most a thousand years
CAPACITY_MAX = 1 << 62

Get = Callable[..., Any]
Counted = Callable[[], tuple[int, int]]


def open_entries(limits: Limits) -> tuple[Moka[Any, Any], Counter[str]]:
    """Return an empty moka cache and its counter of removed entries by cause. Raises `ConfigInvalid`."""
    capacity, ttl, tti = limits
    if isinstance(capacity, bool) or not isinstance(capacity, int) or not 1 <= capacity <= CAPACITY_MAX:
        raise ConfigInvalid("capacity", f"{capacity!r} is not a number of entries: at least 1")
    for field, seconds in (("ttl", ttl), ("tti", tti)):
        if seconds is None:
            continue
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds)
        if not number or not 1e-6 <= seconds <= SECONDS_MAX:
            raise ConfigInvalid(field, f"{seconds!r} is not a time in seconds: more than 0, at most {SECONDS_MAX:,}")
    evicted: Counter[str] = Counter()

    def listener(_key: Hashable, _value: Any, cause: str) -> None:
        evicted[cause] += 1

    return Moka(capacity, ttl, tti, listener), evicted


def reader(moka: Moka[Any, Any]) -> tuple[Get, Counted]:
    """Return a function that reads an entry, and one that returns its hits and misses.

    >>> moka, _ = open_entries((10, None, None))
    >>> get, counted = reader(moka)
    >>> moka.set("a", 1)
    >>> get("a"), get("b"), get("b", 2), counted()
    (1, None, 2, (1, 2))
    """
    hits = misses = 0
    find = moka.get

    def get(key: Hashable, default: Any = None) -> Any:
        """Return the value of `key`, or `default`. Never waits."""
        nonlocal hits, misses
        try:
            found = find(key, MISSING)
        except TypeError as error:
            raise unhashable(error) from error
        if found is MISSING:
            misses += 1
            return default
        hits += 1
        return found

    return get, lambda: (hits, misses)


def unhashable(error: TypeError) -> ConfigInvalid:
    """Return the error for a key that cannot be hashed."""
    return ConfigInvalid("key", f"{error}: the key of an entry must be hashable; nothing was cached")
