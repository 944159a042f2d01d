"""One history from two places: the log's file, and the cold tier that holds what was trimmed from it.

The file is asked first; where it has trimmed what is wanted, the tier is. Segments are in the
manifest before their events are trimmed, so whoever finds them gone from the file finds them in the
tier, at every stage of an offload, and since both go by offset nothing is read twice.

Where retention removed more than the tier holds, the two no longer join. Then the beginning is that of
the file, as if there were no tier; what the tier holds is read by its offsets, up to its end, and
reading on over the hole raises `LogTrimmed`.
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
    """Reads a log and its cold tier as one; safe from several threads at once."""

    def __init__(self, file: SqliteReader, cold: Cold) -> None:
        self._file, self._cold = file, cold
        self._trimmed = 0  # the file has nothing up to here, as far as was seen
        self._epoch = ""
        self._warned = False

    def low_water(self) -> int:
        """Everything up to this offset is gone for good: neither the file nor the tier has it."""
        return self._gone(self._file.low_water())

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        """The next events of a span, from the one place or the other."""
        try:
            if 0 < span.after < self._trimmed:  # the file would look for its next events before it refuses
                raise LogTrimmed(span.after, self._trimmed)
            page = self._file.read(keys, span, limit)
        except LogTrimmed as trimmed:
            self._trimmed = max(self._trimmed, trimmed.low_water)
            self._tier_after(span.after, trimmed)
            return self._cold.read(keys, span, limit)
        try:
            gone = self._gone(page.low_water)
        except ColdDamaged:
            if span.after:  # what is in the file is read whatever the tier is like
                return page
            raise
        if span.after == 0 and gone < page.low_water:  # from the beginning: of what is left anywhere
            return self._cold.read(keys, span, limit)
        page.low_water = gone
        return page

    def narrow(self, span: Span) -> Span:
        """Turn times into offsets, and set an end: the head of now."""
        try:
            narrowed, tier = self._file.narrow(span), None
        except LogTrimmed as trimmed:
            tier = self._tier_after(span.after, trimmed)
            narrowed = self._file.narrow(span._replace(after=0))
        # Only now: a trim in between would otherwise hide what it removed from both.
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
        """What is gone for good, where the file has trimmed everything up to `low_water`."""
        if not low_water:
            return 0
        tier = self._tier()
        if not tier.segments or tier.first > low_water + 1:
            return low_water
        if tier.last < low_water:
            if not self._warned:
                self._warned = True
                record("LOG_COLD_GAP", logging.WARNING, path=self._file.path, first=tier.last + 1, last=low_water)
            return low_water
        return tier.first - 1

    def _tier_after(self, after: int, trimmed: LogTrimmed) -> Manifest:
        """The tier, if it goes on after an offset that the file has trimmed; otherwise the error that tells."""
        tier = self._tier()
        if after >= tier.last:
            raise trimmed
        if after < tier.first - 1:
            raise LogTrimmed(after, min(tier.first - 1, trimmed.low_water)) from trimmed
        return tier

    def _tier(self) -> Manifest:
        """The manifest of now; refused where the tier is another log's."""
        tier = self._cold.manifest()
        if tier.segments and tier.epoch != self._epoch:
            self._epoch = self._file.epoch().hex()
            tier.check_epoch(self._epoch, self._cold.path)
        return tier
