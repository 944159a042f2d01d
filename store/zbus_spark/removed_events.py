"""The events that a log has removed, for the jobs that look for missing ones.

A log knows the identities of removed events for `dedup_s`, and their offsets for longer. The offsets tell how many
events were removed between two others, but not whose events they were.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path

from zbus_log.cold.tier import Cold
from zbus_log.file.database import log_errors, snapshot
from zbus_log.file.removed import count_lost, removed_ranges
from zbus_log.file.tables import LINEAGE_SINCE, file_version, get_low_water
from zbus_log.read.reader import readable
from zbus_log.write.removed_identities import identities_by_publisher

from .offsets import before, following, length

Range = tuple[int, int]


class RemovedEvents:
    """What a log knows of the events that it removed. Can be pickled, for the workers of Spark.

    `identities` has the sequences of each publisher as ascending ranges. `offsets` has ascending ranges of offsets, and
    how many events of each were removed.

    >>> removed = RemovedEvents({7: [(2, 4), (8, 8)]}, [(10, 12, 3), (20, 40, 5)])
    >>> removed.of(7, 3, 9), removed.has(7, 8), removed.has(9, 8)
    ([(3, 4), (8, 8)], True, False)
    >>> removed.between(9, 20), removed.between(9, None), removed.between(38, 41)
    (3, 8, 2)
    """

    def __init__(
        self, identities: Mapping[int, list[Range]] | None = None, offsets: Iterable[tuple[int, int, int]] = ()
    ) -> None:
        listed = list(offsets)
        self._identities = {} if identities is None else identities
        self._first, self._last = [each[0] for each in listed], [each[1] for each in listed]
        self._counts = [0, *accumulate(each[2] for each in listed)]

    def of(self, publisher: int, first: int, last: int) -> list[Range]:
        """Return the sequences of a publisher, from `first` to `last`, that were removed, as ranges."""
        ranges = self._identities.get(publisher, [])
        begin = bisect_left(ranges, first, key=lambda each: each[1])
        end = bisect_right(ranges, last, key=lambda each: each[0])
        return [(max(first, low), min(last, high)) for low, high in ranges[begin:end]]

    def has(self, publisher: int, sequence: int) -> bool:
        """Return whether an event is known to be removed."""
        return bool(self.of(publisher, sequence, sequence))

    def between(self, after: int, end: int | None) -> int:
        """Return how many events between two offsets were removed, at most. `end` None: up to the end of the log."""
        begin = bisect_right(self._last, after)
        stop = len(self._first) if end is None else bisect_left(self._first, end)
        found = max(0, self._counts[stop] - self._counts[begin])
        return found if end is None else min(found, length(following(after), before(end)))


def removed_events(log: str | Path, cold: str | Path | None = None) -> RemovedEvents:
    """Return what a log in a file knows of the events that it removed. `cold` is its cold tier: `<log>-cold`.

    Call it after the events were read: a running node may remove some at any time.
    """
    engine, tier = readable(str(log)), Cold(f"{log}-cold" if cold is None else cold)
    try:
        segments = tier.manifest().segments
        with log_errors(str(log)), engine.connect() as connection, snapshot(connection):
            if file_version(connection) < LINEAGE_SINCE:
                return RemovedEvents()
            offsets = [
                (
                    each.first,
                    each.last,
                    length(each.first, each.last) - each.events - count_lost(connection, each.first, each.last),
                )
                for each in segments
            ]
            after = max(get_low_water(connection), offsets[-1][1] if offsets else 0)
            offsets += [(first, last, length(first, last)) for first, last in removed_ranges(connection, after)]
            return RemovedEvents(identities_by_publisher(connection), offsets)
    finally:
        tier.close()
        engine.dispose()
