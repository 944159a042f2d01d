"""A bounded dict of computed values: a missing value is computed, and a full memo evicts its oldest entry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_set = OrderedDict.__setitem__


class Memo(OrderedDict[K, V]):
    """A dict of at most `max` entries. `memo[key]` calls `make(key)` once and keeps the result.

    An entry that does not fit pushes out the one that was added longest ago, so the memo never forgets everything at
    once. Read with `use` instead of `[]` to push out the least recently used entry. `on_evict(key, value)` is called
    for an entry that was pushed out, and not for one that was deleted. If `make` raises, nothing is kept. Without
    `make`, a missing key raises `KeyError`.

    >>> squares = Memo(2, lambda number: number * number)
    >>> squares[2], squares[3], squares[4], list(squares)
    (4, 9, 16, [3, 4])
    """

    # An OrderedDict finds its oldest entry at once. A dict of 100,000 that loses its first key again and again needs up
    # to a millisecond for it, because it looks at every deleted place before that.

    def __init__(
        self,
        max: int,  # noqa: A002
        make: Callable[[K], V] | None = None,
        on_evict: Callable[[K, V], object] | None = None,
    ) -> None:
        super().__init__()
        self._max, self._make, self._on_evict = max, make, on_evict

    def __missing__(self, key: K) -> V:
        if self._make is None:
            raise KeyError(key)
        value = self._make(key)
        _set(self, key, value)
        if len(self) > self._max:
            self._evict()
        return value

    def __setitem__(self, key: K, value: V) -> None:
        _set(self, key, value)
        if len(self) > self._max:
            self._evict()

    def use(self, key: K) -> V:
        """Return the value as `memo[key]` does, and make this the last entry to be pushed out."""
        value = self[key]
        self.move_to_end(key)
        return value

    def _evict(self) -> None:
        try:
            key, value = self.popitem(last=False)
        except KeyError:
            return  # another thread cleared it
        if self._on_evict is not None:
            self._on_evict(key, value)
