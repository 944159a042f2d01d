"""The events of a peer that wait until those before them were requested from its log. They are bounded.

The oldest ones are evicted first. Its log has them, so the repair then continues until it has supplied them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from zbus.wire.envelope import Envelope

BUFFERED_EVENTS_MAX = 8192
BUFFERED_BYTES_MAX = 16 * 1024 * 1024

Item = tuple[Envelope, str]  # with the link over which it came


class BufferedEvents:
    """The buffered events of one peer, in the order in which they came. Lives on the loop."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._bytes = 0
        self.evicted_up_to = 0  # the highest offset of an evicted event

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def add(self, envelopes: Sequence[Envelope], link: str) -> None:
        """Keep some events that came over a link."""
        for envelope in envelopes:
            self._items.append((envelope, link))
            self._bytes += _size(envelope)
            while len(self._items) > BUFFERED_EVENTS_MAX or self._bytes > BUFFERED_BYTES_MAX:
                self.evicted_up_to = max(self.evicted_up_to, self._remove_first().offset)

    def take(self) -> list[Item]:
        """Return the events by offset, and forget them."""
        taken, self._items, self._bytes = self.by_offset(), deque(), 0
        return taken

    def by_offset(self) -> list[Item]:
        """Return the events by offset."""
        return sorted(self._items, key=lambda item: item[0].offset)

    def remove_supplied(self, covered: int, is_known: Callable[[Envelope], bool]) -> None:
        """Remove events that the log has supplied, up to an offset."""
        while self._items and self._items[0][0].offset <= covered and is_known(self._items[0][0]):
            self._remove_first()

    def merged(self, found: Sequence[Envelope], until: int) -> list[Envelope]:
        """Return the events of a page together with the buffered ones that the log no longer has, in order."""
        offsets = {envelope.offset for envelope in found}
        kept = {each.offset: each for each, _ in self._items if each.offset <= until and each.offset not in offsets}
        return sorted([*found, *kept.values()], key=lambda envelope: envelope.offset)

    def _remove_first(self) -> Envelope:
        envelope, _ = self._items.popleft()
        self._bytes -= _size(envelope)
        return envelope


def _size(envelope: Envelope) -> int:
    return len(envelope.payload) + len(envelope.headers)
