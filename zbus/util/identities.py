"""Identities of events: a publisher id for each key, and sequences that rise from 0 without gaps."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable
from functools import lru_cache
from hashlib import blake2b
from typing import Generic, TypeVar

from .memo import Memo
from .runtime import REAL

PUBLISHER_BITS = 53  # JSON numbers of every language can hold them
RUNS_KEPT = 100

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

    def renew(self) -> None:
        """Give each key a new publisher id, because another process may use the same ones."""
        self._following.clear()


@lru_cache(maxsize=16_384)
def derived_publisher_id(*parts: bytes) -> int:
    """Return the publisher id that belongs to these parts: always the same one."""
    return int.from_bytes(blake2b(b"\0".join(parts), digest_size=8).digest()) >> (64 - PUBLISHER_BITS)


class AssignedIdentities:
    """Identities for messages that arrive without one: a publisher for each topic, new at each start.

    At most `max` topics are known. The sequences of a topic that was forgotten start again, so it gets a new publisher.
    One thread calls `next`; any thread may call `assigned`.
    """

    def __init__(self, max: int) -> None:  # noqa: A002
        self._runs = [secrets.token_bytes(16)]  # the newest first
        # By topic: the run, the publisher and the next sequence.
        self._following = Memo[bytes, tuple[bytes, list[int]]](max, self._new, self._forgotten)

    def next(self, topic: bytes) -> tuple[int, int]:
        """Return the publisher id and the sequence of the next message of a topic."""
        _, entry = self._following[topic]
        publisher_id, sequence = entry
        entry[1] = sequence + 1
        return publisher_id, sequence

    def assigned(self, publisher_id: int, topic: bytes) -> bool:
        """Return whether this is a publisher that was assigned to the topic here."""
        return any(derived_publisher_id(run, topic) == publisher_id for run in self._runs)

    def _new(self, topic: bytes) -> tuple[bytes, list[int]]:
        run = self._runs[0]
        return run, [derived_publisher_id(run, topic), 0]

    def _forgotten(self, topic: bytes, known: tuple[bytes, list[int]]) -> None:
        if known[0] == self._runs[0]:
            self._runs = [secrets.token_bytes(16), *self._runs][:RUNS_KEPT]
