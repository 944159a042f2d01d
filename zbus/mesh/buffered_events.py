"""The events of a peer that wait until those before them were requested from its log. They are bounded.

The oldest ones are evicted first. Its log has them, so the repair then continues until it has supplied them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from zbus.wire.envelope import Envelope

BUFFERED_EVENTS_MAX = 8192
BUFFERED_BYTES_MAX = 16 * 1024 * 1024

BUFFERED_TOTAL_MAX = 64 * 1024 * 1024

Item = tuple[Envelope, str]  # with the link over which it came


class BufferBudget:
    """The bytes that the buffered events of all peers take together."""

    def __init__(self) -> None:
        self.used_bytes = 0

    @property
    def is_exceeded(self) -> bool:
        """Whether the next peer that buffers events must evict some of its own."""
        return self.used_bytes > BUFFERED_TOTAL_MAX


class BufferedEvents:
    """The buffered events of one peer, in the order in which they came. Lives on the loop."""

    def __init__(self, budget: BufferBudget) -> None:
        self._items: deque[Item] = deque()
        self._bytes, self._budget = 0, budget
        self.evicted_up_to = 0  # the highest offset of an evicted event

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def add(self, envelopes: Sequence[Envelope], link: str) -> None:
        """Keep some events that came over a link."""
        for envelope in envelopes:
            self._items.append((envelope, link))
            self._count(_size(envelope))
            while self._items and self._is_full:
                self.evicted_up_to = max(self.evicted_up_to, self._remove_first().offset)

    def take(self) -> list[Item]:
        """Return the events by offset, and forget them."""
        taken, self._items = self.by_offset(), deque()
        self._count(-self._bytes)
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
        self._count(-_size(envelope))
        return envelope

    @property
    def _is_full(self) -> bool:
        too_large = self._bytes > BUFFERED_BYTES_MAX or self._budget.is_exceeded
        return too_large or len(self._items) > BUFFERED_EVENTS_MAX

    def _count(self, size: int) -> None:
        self._bytes += size
        self._budget.used_bytes += size


def _size(envelope: Envelope) -> int:
    return len(envelope.payload) + len(envelope.headers)
