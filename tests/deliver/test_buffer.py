"""Buffers of a subscription: a queue of a number of events, and a backlog of a number of bytes beside it."""

from __future__ import annotations

from zbus.deliver.buffer import EVENT_BYTES, Backlog, Buffer
from zbus.event import Event


def events(*sequences: int, payload: bytes = b"") -> list[Event]:
    return [Event(7, each, 1, "a/b", payload) for each in sequences]


def test_the_free_capacity_of_a_backlog_is_never_negative() -> None:
    backlog = Backlog(3 * EVENT_BYTES)
    assert backlog.free == 3 * EVENT_BYTES
    backlog.add(events(1, 2))
    assert backlog.free == EVENT_BYTES

    backlog.add(events(3, 4))  # whatever their size

    assert (backlog.free, backlog.bytes, backlog.events) == (0, 4 * EVENT_BYTES, 4)
    assert backlog.fill(events(5)) == 0
    queue = Buffer(2)
    backlog.move_to(queue)
    assert (backlog.free, backlog.bytes, queue.events, queue.free) == (EVENT_BYTES, 2 * EVENT_BYTES, 2, 0)


def test_a_single_event_fits_into_a_backlog_whatever_its_size_and_leaves_no_free_capacity() -> None:
    backlog = Backlog(EVENT_BYTES)

    assert backlog.fill(events(1, 2, payload=b"x")) == 1

    assert (backlog.free, backlog.bytes) == (0, EVENT_BYTES + 1)
    assert [event.sequence for event in backlog.drain()] == [1]
    assert (backlog.free, backlog.bytes) == (EVENT_BYTES, 0)


def test_the_free_capacity_of_a_queue_is_never_negative_and_gaps_take_none_of_it() -> None:
    queue = Buffer(2)
    queue.drop_newest(events(1))
    assert (queue.free, queue.events) == (2, 0)
    assert queue.fill(events(2, 3, 4)) == 2
    queue.items.extend(events(5))

    assert (queue.free, queue.events) == (0, 3)
    assert queue.fill(events(6)) == 0
