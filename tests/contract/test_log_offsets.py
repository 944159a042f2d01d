"""The log port: what the log says about offsets, so that nothing outside it calculates with them."""

from __future__ import annotations

from itertools import combinations

from log_contract import append, follow, rows

from zbus.ports.log import Log, Span


def test_the_position_before_an_offset_is_where_to_read_from_to_get_its_event_next(log: Log) -> None:
    offsets = append(log, rows(30)).offsets
    for offset in offsets:
        found = follow(log, offset, span=Span(log.before(offset), offset))
        assert [event.offset for event in found] == [offset]

    assert log.before(0) == 0


def test_the_count_is_exact_if_offsets_are_dense_and_never_too_small(log: Log) -> None:
    offsets = append(log, rows(40)).offsets
    positions = [0, *offsets]

    for (first, after), (last, until) in combinations(enumerate(positions), 2):
        count = log.count(after, until)
        assert count >= last - first
        if log.promise.dense:
            assert count == last - first
        assert log.count(until, after) == 0
        assert log.count(after, after) == 0
