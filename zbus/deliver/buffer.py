"""Buffers of a subscription: its queue, and the backlog beside it.

Both keep events in order, with a gap where events were dropped. Only events use capacity: a gap uses none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zbus.event import Event

EVENT_BYTES = 256  # approximate size of an event without its payload


class Gap:
    """Dropped events: how many, and the offset of the last one that the log has (0 if the log has no such event)."""

    __slots__ = ("missed", "until")

    def __init__(self) -> None:
        self.missed = self.until = 0

    def add(self, dropped: Event | Gap) -> None:
        """Include a dropped event, or a gap that came before or after."""
        if isinstance(dropped, Gap):
            self.missed += dropped.missed
            self.until = dropped.until or self.until
        else:
            self.missed += 1
            self.until = dropped.offset or self.until


class Buffer:
    """The queue of a subscription, for `capacity` events.

    A page of the log may hold more than that. It is read only when nothing is queued, and nothing is queued behind it
    until it was handed over.
    """

    __slots__ = ("_gaps", "capacity", "items")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.items: deque[Event | Gap] = deque()  # a subscriber takes events from here; `take_gap` takes the gaps
        self._gaps = 0

    @property
    def events(self) -> int:
        """The number of events that wait."""
        return len(self.items) - self._gaps

    @property
    def free(self) -> int:
        """The number of events that still fit; never negative."""
        return max(0, self.capacity - self.events)

    def fill(self, events: Sequence[Event]) -> int:
        """Add the events that fit, and return how many."""
        added = min(self.free, len(events))
        self.items.extend(events[:added])
        return added

    def drop_newest(self, events: Sequence[Event]) -> None:
        """Record a gap for these events, which follow the queued ones."""
        gap = self.items[-1] if self.items else None
        if not isinstance(gap, Gap):
            gap = Gap()
            self.add_gap(gap)
        for event in events:
            gap.add(event)

    def drop_oldest(self, events: Sequence[Event]) -> int:
        """Add events, drop the oldest ones until the rest fits, and return how many were dropped."""
        items, gap = self.items, Gap()
        items.extend(events)
        excess = dropped = max(0, self.events - self.capacity)
        while excess or isinstance(items[0], Gap):
            oldest = items.popleft()
            if isinstance(oldest, Gap):
                self._gaps -= 1
            else:
                excess -= 1
            gap.add(oldest)
        if gap.missed:
            items.appendleft(gap)
            self._gaps += 1
        return dropped

    def add_gap(self, gap: Gap) -> None:
        """Add a gap after the queued events."""
        self.items.append(gap)
        self._gaps += 1

    def take_gap(self) -> Gap:
        """Remove and return the gap at the front."""
        gap = self.items.popleft()
        assert isinstance(gap, Gap)
        self._gaps -= 1
        return gap


class Backlog(Buffer):
    """Events that wait beside a queue. Its capacity is bytes; a single event fits whatever its size."""

    __slots__ = ("bytes",)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.bytes = 0

    @property
    def free(self) -> int:
        """The number of bytes that still fit; never negative."""
        return max(0, self.capacity - self.bytes)

    def fill(self, events: Sequence[Event]) -> int:
        """Add events, in order, until one does not fit. Return how many were added."""
        for at, event in enumerate(events):
            size = _size(event)
            if size > self.free and self.events:
                return at
            self.bytes += size
            self.items.append(event)
        return len(events)

    def add(self, events: Sequence[Event]) -> None:
        """Add events whatever their size."""
        self.bytes += sum([_size(event) for event in events])
        self.items.extend(events)

    def move_to(self, queue: Buffer) -> None:
        """Move events into `queue` while they fit, including gaps."""
        items = self.items
        while items:
            first = items[0]
            if isinstance(first, Gap):
                queue.add_gap(self.take_gap())
            elif queue.free:
                self.bytes -= _size(first)
                queue.items.append(items.popleft())
            else:
                return

    def drain(self) -> list[Event]:
        """Remove and return the events of a backlog without gaps."""
        events: list[Event] = list(self.items)  # type: ignore[arg-type]  # there is no gap
        self.items.clear()
        self.bytes = 0
        return events


def _size(event: Event) -> int:
    return EVENT_BYTES + len(event.payload)
