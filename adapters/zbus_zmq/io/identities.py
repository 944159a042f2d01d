"""Identities for messages that arrive without one: a publisher per topic, new at each start, sequences from 0."""

from __future__ import annotations

import hashlib
import secrets

from zbus.util.memo import Memo

TOPICS_MAX = 100_000
PUBLISHER_BITS = 53  # survives JSON
GENERATIONS_KNOWN = 8


class IdentityAllocator:
    """Assigns identities to incoming messages: a publisher per topic, sequences from 0."""

    def __init__(self) -> None:
        self._seed = secrets.token_bytes(16)
        self._generation = 0
        # By topic: the generation, the publisher and the next sequence.
        self._following = Memo[bytes, list[int]](TOPICS_MAX, self._new, self._forgotten)
        self._allocated: list[set[int]] = [set()]  # of the last generations

    def next(self, topic: bytes) -> tuple[int, int]:
        """Return the publisher and the sequence of the next message of a topic."""
        following = self._following[topic]
        _, publisher, sequence = following
        following[2] = sequence + 1
        return publisher, sequence

    def allocated(self, publisher_id: int) -> bool:
        """Return whether this publisher was allocated here."""
        return any(publisher_id in generation for generation in self._allocated)

    def _new(self, topic: bytes) -> list[int]:
        salt = self._seed + self._generation.to_bytes(8)
        digest = hashlib.blake2b(topic, key=salt, digest_size=8).digest()
        publisher = int.from_bytes(digest) >> (64 - PUBLISHER_BITS)
        self._allocated[-1].add(publisher)
        return [self._generation, publisher, 0]

    def _forgotten(self, topic: bytes, following: list[int]) -> None:
        if following[0] == self._generation:  # it starts again at 0, so it needs an unused publisher
            self._generation += 1
            self._allocated = [*self._allocated[1 - GENERATIONS_KNOWN :], set()]
