"""Identities: one publisher for each key, sequences without gaps, and no sequence twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from zbus.util.identities import PUBLISHER_BITS, Identities, first_identity


def numbered() -> Callable[[int], int]:
    numbers = count(7)

    def randbits(bits: int) -> int:
        assert bits == PUBLISHER_BITS
        return next(numbers)

    return randbits


def test_each_key_has_a_publisher_and_sequences_from_0() -> None:
    identities = Identities[str](10, numbered())

    assert [identities.next(key) for key in "aabab"] == [(7, 0), (7, 1), (8, 0), (7, 2), (8, 1)]


def test_several_events_get_consecutive_sequences() -> None:
    identities = Identities[str](10)

    assert [identities.next("a", 3)[1], identities.next("a", 2)[1], identities.next("a")[1]] == [0, 3, 5]


def test_the_least_recently_used_key_gets_another_publisher_later() -> None:
    identities = Identities[str](2, numbered())
    a, b = identities.next("a"), identities.next("b")
    assert identities.next("a") == (a[0], 1)

    identities.next("c")

    assert identities.next("a") == (a[0], 2)
    again = identities.next("b")
    assert again[0] != b[0]
    assert again[1] == 0


def test_a_new_publisher_id_fits_into_53_bits() -> None:
    ids = {first_identity() for _ in range(100)}

    assert len(ids) == 100
    assert all(0 <= publisher_id < 1 << 53 and sequence == 0 for publisher_id, sequence in ids)
