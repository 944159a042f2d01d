"""A window: the items that were seen recently, bounded by number and by time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .runtime import REAL

T = TypeVar("T", bound=Hashable)


class Window(Generic[T]):
    """The last `max` items that were added, and of those only the ones younger than `within_s` seconds.

    A full window forgets the item that was added longest ago. For one thread at a time.

    >>> window = Window(2)
    >>> [window.seen(item) for item in "abacb"], "a" in window
    ([False, False, True, False, True], False)
    """

    __slots__ = ("_added_at", "_max", "_monotonic", "_within_s")

    def __init__(
        self,
        max: int,  # noqa: A002
        within_s: float | None = None,
        monotonic: Callable[[], float] = REAL.monotonic,
    ) -> None:
        self._max, self._within_s, self._monotonic = max, within_s, monotonic
        self._added_at: OrderedDict[T, float] = OrderedDict()  # the oldest comes first

    def __len__(self) -> int:
        return len(self._added_at)

    def __contains__(self, item: T) -> bool:
        if self._within_s is None:
            return item in self._added_at
        added_at = self._added_at.get(item)
        return added_at is not None and self._monotonic() - added_at < self._within_s

    def seen(self, item: T) -> bool:
        """Return whether the item is in the window. If not, it is from now on."""
        if self._within_s is None:
            added_at = self._added_at
            if item in added_at:
                return True
            added_at[item] = 0.0
            if len(added_at) > self._max:
                added_at.popitem(last=False)
            return False
        if item in self:
            return True
        self.add(item)
        return False

    def add(self, item: T) -> None:
        """Put the item into the window as the youngest one."""
        added_at, within_s = self._added_at, self._within_s
        if item in added_at:
            added_at.move_to_end(item)
        if within_s is None:
            added_at[item] = 0.0
        else:
            now = added_at[item] = self._monotonic()
            while now - next(iter(added_at.values())) >= within_s:
                added_at.popitem(last=False)
        if len(added_at) > self._max:
            added_at.popitem(last=False)

    def remove(self, item: T) -> bool:
        """Take the item out of the window. Return whether it was in it."""
        added_at = self._added_at.pop(item, None)
        return added_at is not None and (self._within_s is None or self._monotonic() - added_at < self._within_s)
