"""Reader of one history from two places: the log's file, and the cold tier with the events trimmed from it.

The reader tries the file first, and the tier if the file has trimmed the events. Segments are in the manifest before
their events are trimmed, so events that are missing from the file are in the tier at every stage of an offload. Both
use the same offsets, so nothing is read twice.

If retention removed more than the tier contains, there is a gap between the two. Then the history begins with the
file, as if there were no tier. The tier can still be read by its offsets up to its end; reading across the gap raises
`LogTrimmed`.
"""

from __future__ import annotations

import logging

from zbus.errors import LogTrimmed
from zbus.keys import KeySet
from zbus.observe.records import record
from zbus.ports.log import Page, Span
from zbus_log.cold.tier import Cold
from zbus_log.file.manifest import ColdDamaged, Manifest

from .reader import SqliteReader


class TieredReader:
    """Reads a log and its cold tier as one history. Thread-safe."""

    def __init__(self, file: SqliteReader, cold: Cold) -> None:
        self._file, self._cold = file, cold
        self._trimmed = 0  # the highest low-water mark of the file seen so far
        self._epoch = ""
        self._offloaded = (0, 0)  # a low-water mark of the file, and how far events were offloaded then
        self._warned = False

    def low_water(self) -> int:
        """Return the offset up to which neither the file nor the tier has an event."""
        return self._gone(self._file.low_water())

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        """Return the next events of a span, from the file or the tier."""
        try:
            if 0 < span.after < self._trimmed:  # the file would search for its next events before it raises
                raise LogTrimmed(span.after, self._file.low_water())  # it may be higher by now
            page = self._file.read(keys, span, limit)
        except LogTrimmed as trimmed:
            self._trimmed = max(self._trimmed, trimmed.low_water)
            self._tier_after(span.after, trimmed)
            return self._cold.read(keys, span, limit)
        try:
            gone = self._gone(page.low_water)
        except ColdDamaged:
            if span.after:  # events in the file stay readable even if the tier is damaged
                return page
            raise
        if span.after == 0 and gone < page.low_water:  # start at the oldest event in either place
            return self._cold.read(keys, span, limit)
        page.low_water = gone
        return page

    def narrow(self, span: Span) -> Span:
        """Turn times into offsets, and set the end to the current head if the span is open."""
        try:
            narrowed, tier = self._file.narrow(span), None
        except LogTrimmed as trimmed:
            tier = self._tier_after(span.after, trimmed)
            narrowed = self._file.narrow(span._replace(after=0))
        # Read this last. Otherwise a trim in between would hide the events that it removed from both.
        low_water = self._file.low_water()
        if tier is None and (span.after or self._gone(low_water) == low_water):
            return narrowed
        after, until = span.after, narrowed.until
        if span.from_ns is not None and (tier is None or tier.last >= low_water):
            first = self._cold.first_at(span.from_ns, span.after)
            after = max(span.after, narrowed.after if first is None else min(narrowed.after, first - 1))
        if span.to_ns is not None and until is not None:
            last = self._cold.last_at(span.to_ns)
            until = max(until, last if span.until is None else min(last, span.until))
        return narrowed._replace(after=after, until=until)

    def _gone(self, low_water: int) -> int:
        """Return the offset up to which every event is lost, if the file has trimmed everything up to `low_water`."""
        if not low_water:
            return 0
        tier = self._tier(low_water)
        if not tier.segments or tier.first > low_water + 1:
            return low_water
        if tier.last < low_water:
            if not self._warned:
                self._warned = True
                record("LOG_COLD_GAP", logging.WARNING, path=self._file.path, first=tier.last + 1, last=low_water)
            return low_water
        return tier.first - 1

    def _tier_after(self, after: int, trimmed: LogTrimmed) -> Manifest:
        """Return the tier if it continues after an offset that the file has trimmed; otherwise raise `LogTrimmed`."""
        tier = self._tier(trimmed.low_water)
        if after >= tier.last:
            raise trimmed
        if after < tier.first - 1:
            raise LogTrimmed(after, min(tier.first - 1, trimmed.low_water)) from trimmed
        return tier

    def _tier(self, low_water: int) -> Manifest:
        """Return the current manifest, for a file that begins after `low_water`.

        Raises `ColdDamaged` if the tier belongs to another log, or lacks events that were moved to it.
        """
        if self._offloaded[0] != low_water:
            self._offloaded = low_water, self._file.offloaded_until()
        self._cold.check_holds(min(low_water, self._offloaded[1]))
        tier = self._cold.manifest()
        if tier.segments and tier.epoch != self._epoch:
            self._epoch = self._file.epoch().hex()
            tier.check_epoch(self._epoch, self._cold.path)
        return tier
