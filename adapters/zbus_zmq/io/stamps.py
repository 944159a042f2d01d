"""What a message through brokers is known by: its sender, and a number that rises.

Through several brokers a message arrives once from each. They drop independently, so what one of them lost may come
from another after later messages: what was seen is remembered message by message, not by the highest number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

STAMP_BYTES = 16
SENDER_BYTES = 8
SEEN_MAX = 65_536


def stamps_of(node: str) -> Callable[[], bytes]:
    """The stamps of a node's messages, one after the other."""
    sender, ordinal = bytes.fromhex(node), itertools.count(1)
    return lambda: sender + next(ordinal).to_bytes(STAMP_BYTES - SENDER_BYTES)


class Stamps:
    """Remembers at least the last `size` stamps, and at most twice as many. On one thread.

    >>> seen = Stamps()
    >>> [seen.first(stamp) for stamp in (b"a6", b"a6", b"a5", b"a6")]
    [True, False, True, False]
    """

    __slots__ = ("_old", "_size", "_young")

    def __init__(self, size: int = SEEN_MAX) -> None:
        self._size = size
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def first(self, stamp: bytes) -> bool:
        """Whether a stamp was not seen before; from now on it was."""
        if stamp in self._young or stamp in self._old:
            return False
        if len(self._young) >= self._size:
            self._old, self._young = self._young, set()
        self._young.add(stamp)
        return True
