"""Identities: one publisher for each key, sequences without gaps, and no sequence twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from zbus.util.identities import (
    PUBLISHER_BITS,
    RUNS_KEPT,
    AssignedIdentities,
    Identities,
    derived_publisher_id,
    first_identity,
)


def numbered() -> Callable[[int], int]:
    numbers = count(7)

    def randbits(bits: int) -> int:
        assert bits == PUBLISHER_BITS
        return next(numbers)

    return randbits


def test_each_key_has_a_publisher_and_sequences_from_0() -> None:
    identities = Identities[str](10, numbered())

    assert [identities.next(key) for key in "aabab"] == [(7, 0), (7, 1), (8, 0), (7, 2), (8, 1)]


def test_renewed_identities_begin_again_with_another_publisher() -> None:
    identities = Identities[str](10, numbered())
    assert [identities.next(key) for key in "aab"] == [(7, 0), (7, 1), (8, 0)]

    identities.renew()

    assert [identities.next(key) for key in "ab"] == [(9, 0), (10, 0)]


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


def test_a_topic_that_was_forgotten_gets_a_new_publisher_and_the_old_one_is_still_known() -> None:
    identities = AssignedIdentities(3)
    first = [identities.next(topic) for topic in (b"a", b"b", b"c", b"a")]
    identities.next(b"d")  # one too many
    again = identities.next(b"a")

    assert [sequence for _, sequence in first] == [0, 0, 0, 1]
    assert again[1] == 0
    assert again[0] != first[0][0]
    assert identities.assigned(first[0][0], b"a")
    assert identities.assigned(again[0], b"a")
    assert not identities.assigned(again[0], b"b")
    assert not identities.assigned(12345, b"a")


def test_only_the_topic_known_longest_is_forgotten_and_no_identity_is_used_twice() -> None:
    identities = AssignedIdentities(3)

    kept = [identities.next(topic) for topic in (b"a", b"b", b"c", b"d", b"b", b"c")]
    given = [identities.next(b"%d" % (number * number % 7)) for number in range(200)]

    assert kept[4:] == [(kept[1][0], 1), (kept[2][0], 1)]
    assert len({*kept, *given}) == len(kept) + len(given)


def test_the_publishers_that_are_still_known_are_bounded() -> None:
    identities = AssignedIdentities(1)
    publishers = [identities.next(b"%d" % (number % 2))[0] for number in range(2 * RUNS_KEPT + 2)]

    assert not identities.assigned(publishers[0], b"0")
    assert identities.assigned(publishers[-2], b"0")


def test_two_processes_assign_different_publishers() -> None:
    assert AssignedIdentities(1).next(b"a") != AssignedIdentities(1).next(b"a")


def test_a_derived_publisher_id_is_always_the_same() -> None:
    assert derived_publisher_id(b"jetstream", b"ORDERS", b"2026-01-01T00:00:00Z") == 4900477155605116
