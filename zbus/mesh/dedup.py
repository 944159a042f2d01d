"""Deduplication of received events by identity, in bounded memory.

The sequences of a publisher rise, so a sequence above the highest one seen is new. Sequences that were skipped may
still arrive over another link. They are kept as ranges, so that a leap costs the same whatever its length. So the first
event of a publisher says nothing about the earlier ones: a forged one does not silence its publisher.

The number of ranges is bounded, for each publisher and over all of them, and so is the number of publishers. What was
forgotten because of these bounds cannot be distinguished from duplicates, and is called late.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from enum import Enum

from zbus.util.memo import Memo

PUBLISHERS_MAX = 100_000
RANGES_MAX = 1_000  # of one publisher
RANGES_TOTAL_MAX = 100_000
_LATER = float("inf")


class Arrival(Enum):
    """The verdict on an identity that arrives."""

    NEW = 1
    DUPLICATE = 2  # it was received before
    LATE = 3  # it is older than what is remembered, so it may have been received before
    SKIPPED = 4  # later ones of its publisher came first


class _Publisher:
    """Between `first` and `last`, every sequence was received except the skipped ones.

    None was received before `first`, unless something was forgotten.
    """

    __slots__ = ("first", "has_forgotten", "last", "skipped")

    def __init__(self, first: int, has_forgotten: bool) -> None:
        self.first, self.has_forgotten = first, has_forgotten
        self.last = first - 1
        self.skipped: list[tuple[int, int]] = []  # ranges with both ends, ascending

    def forget_ranges(self, number: int) -> None:
        """Forget the lowest skipped ranges, and whatever was received before their ends."""
        self.first, self.has_forgotten = self.skipped[number - 1][1] + 1, True
        del self.skipped[:number]


class Dedup:
    """The identities that were received. Not thread-safe. `on_evict` is called for each publisher that is forgotten.

    >>> seen = Dedup()
    >>> [seen.arrival(7, sequence).name for sequence in (5, 5, 7, 6, 3, 3)]
    ['NEW', 'DUPLICATE', 'NEW', 'NEW', 'NEW', 'DUPLICATE']
    """

    def __init__(self, on_evict: Callable[[], object] = lambda: None) -> None:
        self._on_evict = on_evict
        self._publishers = Memo[int, _Publisher](PUBLISHERS_MAX, on_evict=self._evicted)  # least recently used first
        self._skipping = Memo[int, _Publisher](PUBLISHERS_MAX)  # those with skipped ranges, in the same order
        self._ranges = 0  # of all publishers
        self._has_evicted = False

    def last(self, publisher_id: int) -> int | None:
        """Return the highest sequence received from a publisher, or None."""
        publisher = self._publishers.get(publisher_id)
        return publisher.last if publisher is not None else None

    def unbroken_until(self, publisher_id: int) -> int:
        """Return the highest sequence received from a publisher before the first skipped one; -1 if it is unknown.

        >>> seen = Dedup()
        >>> [seen.arrival(7, sequence).name for sequence in (5, 6, 9)]
        ['NEW', 'NEW', 'NEW']
        >>> seen.unbroken_until(7), seen.unbroken_until(8)
        (6, -1)
        """
        publisher = self._publishers.get(publisher_id)
        if publisher is None:
            return -1
        return publisher.skipped[0][0] - 1 if publisher.skipped else publisher.last

    def skipped_before(self, publisher_id: int, sequence: int) -> int | None:
        """Return the first of the sequences directly before this one that were skipped, or None if there are none."""
        publisher = self._publishers.get(publisher_id)
        if publisher is None:
            return None
        at = bisect_right(publisher.skipped, (sequence - 1, _LATER)) - 1
        return publisher.skipped[at][0] if at >= 0 and publisher.skipped[at][1] >= sequence - 1 else None

    def arrival(self, publisher_id: int, sequence: int) -> Arrival:
        """Return whether this identity is new, and remember it."""
        publisher = self._publishers.get(publisher_id)
        if publisher is None:
            publisher = self._publishers[publisher_id] = _Publisher(sequence, self._has_evicted)
        else:
            self._publishers.move_to_end(publisher_id)
        last = publisher.last
        if sequence > last:
            publisher.last = sequence
            if sequence > last + 1:
                publisher.skipped.append((last + 1, sequence - 1))
                self._ranges_changed(publisher_id, publisher, 1)
            return Arrival.NEW
        if sequence < publisher.first:
            if publisher.has_forgotten:
                return Arrival.LATE
            if sequence + 1 < publisher.first:
                publisher.skipped.insert(0, (sequence + 1, publisher.first - 1))
                self._ranges_changed(publisher_id, publisher, 1)
            if not publisher.has_forgotten:  # the new range may have been one too many
                publisher.first = sequence
            return Arrival.NEW
        return self._arrival_of_skipped(publisher_id, publisher, sequence)

    def look_up(self, publisher_id: int, sequence: int) -> Arrival:
        """Return what is known of an identity, without remembering it.

        >>> seen = Dedup()
        >>> seen.arrival(7, 5), seen.arrival(7, 7)
        (<Arrival.NEW: 1>, <Arrival.NEW: 1>)
        >>> [seen.look_up(7, sequence).name for sequence in (4, 5, 6, 8)]
        ['SKIPPED', 'DUPLICATE', 'SKIPPED', 'NEW']
        """
        publisher = self._publishers.get(publisher_id)
        if publisher is None or sequence > publisher.last:
            return Arrival.NEW
        if sequence < publisher.first:
            return Arrival.LATE if publisher.has_forgotten else Arrival.SKIPPED
        at = bisect_right(publisher.skipped, (sequence, _LATER)) - 1
        return Arrival.DUPLICATE if at < 0 or sequence > publisher.skipped[at][1] else Arrival.SKIPPED

    def forget(self, publisher_id: int, sequence: int) -> None:
        """Make an identity new again, because its event was neither stored nor delivered."""
        publisher = self._publishers.get(publisher_id)
        if publisher is None or not publisher.first <= sequence <= publisher.last:
            return
        at = bisect_right(publisher.skipped, (sequence, _LATER))
        if at == 0 or sequence > publisher.skipped[at - 1][1]:
            publisher.skipped.insert(at, (sequence, sequence))
            self._ranges_changed(publisher_id, publisher, 1)

    def _arrival_of_skipped(self, publisher_id: int, publisher: _Publisher, sequence: int) -> Arrival:
        skipped = publisher.skipped
        at = bisect_right(skipped, (sequence, _LATER)) - 1
        if at < 0 or sequence > skipped[at][1]:
            return Arrival.DUPLICATE
        start, end = skipped[at]
        skipped[at : at + 1] = [each for each in ((start, sequence - 1), (sequence + 1, end)) if each[0] <= each[1]]
        self._ranges_changed(publisher_id, publisher, (start < sequence) + (sequence < end) - 1)
        return Arrival.NEW

    def _ranges_changed(self, publisher_id: int, publisher: _Publisher, change: int) -> None:
        """Keep the number of ranges within its bounds."""
        self._ranges += change
        if len(publisher.skipped) > RANGES_MAX:
            self._forget_ranges(publisher, 1)
        if not publisher.skipped:
            self._skipping.pop(publisher_id, None)
            return
        self._skipping[publisher_id] = publisher
        self._skipping.move_to_end(publisher_id)
        while self._ranges > RANGES_TOTAL_MAX:
            _, oldest = self._skipping.popitem(last=False)
            self._forget_ranges(oldest, len(oldest.skipped))

    def _forget_ranges(self, publisher: _Publisher, number: int) -> None:
        publisher.forget_ranges(number)
        self._ranges -= number

    def _evicted(self, publisher_id: int, publisher: _Publisher) -> None:
        self._has_evicted = True
        self._skipping.pop(publisher_id, None)
        self._ranges -= len(publisher.skipped)
        self._on_evict()
