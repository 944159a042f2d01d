"""A window of what was seen lately, to drop what arrives twice: over several brokers, or two subscriptions.

Besides its identity an event is known by its key, because processes of an older Dynamo gave all of their
publishers one id.
"""

from __future__ import annotations

SEEN_MAX = 100_000


class Window:
    """Remembers at least the last `size` events, and at most twice as many. One thread at a time."""

    __slots__ = ("_old", "_size", "_young")

    def __init__(self, size: int = SEEN_MAX) -> None:
        self._size = size
        self._young: set[tuple[int, int, str]] = set()
        self._old: set[tuple[int, int, str]] = set()

    def first(self, publisher_id: int, sequence: int, key: str) -> bool:
        """Whether this event was not seen before; from now on it was.

        >>> window = Window()
        >>> window.first(1, 0, "a/b"), window.first(1, 0, "a/b"), window.first(1, 0, "a/c")
        (True, False, True)
        """
        event = (publisher_id, sequence, key)
        if event in self._young or event in self._old:
            return False
        if len(self._young) >= self._size:
            self._old, self._young = self._young, set()
        self._young.add(event)
        return True
