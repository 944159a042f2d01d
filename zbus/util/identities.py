"""Identities of events: a publisher id for each key, and sequences that rise from 0 without gaps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .memo import Memo
from .runtime import REAL

PUBLISHER_BITS = 53  # JSON numbers of every language can hold them

K = TypeVar("K", bound=Hashable)


def first_identity(randbits: Callable[[int], int] = REAL.randbits) -> tuple[int, int]:
    """Return the publisher id of a new publisher, and the sequence of its first event."""
    return randbits(PUBLISHER_BITS), 0


class Identities(Generic[K]):
    """The publishers of at most `max` keys. Only the least recently used key is forgotten; it gets a new publisher id
    when it is used again, so a sequence is never used twice.

    Call `next` once nothing can reject the event: a sequence that was used for a rejected event would look like a lost
    one.

    >>> identities = Identities[str](2, lambda bits: 7)
    >>> identities.next("a", 3), identities.next("a"), identities.next("b")
    ((7, 0), (7, 3), (7, 0))
    """

    __slots__ = ("_following",)

    def __init__(self, max: int, randbits: Callable[[int], int] = REAL.randbits) -> None:  # noqa: A002
        self._following = Memo[K, list[int]](max, lambda _: [*first_identity(randbits)])

    def next(self, key: K, events: int = 1) -> tuple[int, int]:
        """Use up the sequences of some events. Return the publisher id and the sequence of the first one."""
        entry = self._following.use(key)
        publisher_id, sequence = entry
        entry[1] = sequence + events
        return publisher_id, sequence
