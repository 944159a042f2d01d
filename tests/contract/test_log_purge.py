"""The log port: a purge removes the events of some keys, and nothing else changes."""

from __future__ import annotations

import pytest
from log_contract import Logs, append, follow, outcome_of, wait_until

from zbus.errors import LogReadOnly
from zbus.keys import KeySet
from zbus.ports.log import Log, Row, Span, Stored

KEYS = ["a", "a/b", "x"]
PURGED = KeySet(["a/**"])


def batch(first: int, count: int) -> list[Row]:
    return [Row(7, n, 1_000 + n, KEYS[n % 3], b"%d" % n) for n in range(first, first + count)]


@pytest.fixture
def stored(log: Log) -> list[tuple[Row, int]]:
    rows = batch(0, 60)
    return list(zip(rows, append(log, rows).offsets, strict=True))


def test_reads_leave_purged_events_out_and_cover_their_offsets(log: Log, stored: list[tuple[Row, int]]) -> None:
    purged = log.purge(PURGED)

    assert (purged.removed, purged.until) == (40, stored[-1][1])
    left = [offset for row, offset in stored if row.key == "x"]
    assert [event.offset for event in follow(log, stored[-1][1], limit=7)] == left
    assert follow(log, stored[-1][1], PURGED) == []


def test_the_head_and_digests_stay(log: Log, stored: list[tuple[Row, int]]) -> None:
    wait_until(lambda: log.head() == stored[-1][1])  # it may be stale
    before = [(log.head(), log.digest(offset)) for _, offset in stored]

    log.purge(KeySet(["**"]))

    assert [(log.head(), log.digest(offset)) for _, offset in stored] == before
    assert log.low_water() == 0
    assert min(append(log, batch(60, 3)).offsets) > stored[-1][1]


def test_a_start_by_time_skips_purged_events(log: Log, stored: list[tuple[Row, int]]) -> None:
    log.purge(PURGED)

    narrowed = log.narrow(Span(from_ns=1_000 + 30))  # an event of "a"

    (first, *_) = follow(log, stored[-1][1], span=Span(narrowed.after))
    assert (first.offset, narrowed.after) == (stored[32][1], log.before(stored[32][1]))


def test_a_purged_event_that_is_put_again_is_not_stored(log: Log, stored: list[tuple[Row, int]]) -> None:
    log.purge(PURGED)

    again = outcome_of(log, [stored[0][0], stored[2][0]])

    assert isinstance(again, Stored)
    assert set(again.repeated) == {0, 1}
    wait_until(lambda: log.head() == stored[-1][1])


def test_later_events_of_purged_keys_are_stored(log: Log, stored: list[tuple[Row, int]]) -> None:
    log.purge(PURGED)
    later = append(log, batch(60, 6)).offsets

    found = follow(log, later[-1], PURGED)

    assert [event.offset for event in found] == [each for n, each in enumerate(later) if n % 3 != 2]


def test_durable_subscriptions_do_not_hold_it_back_and_are_named(logs: Logs, log: Log) -> None:
    rows = batch(0, 9)
    offsets = append(log, rows).offsets
    log.cursors.claim("behind", ["a/**"], offsets[2])
    log.cursors.claim("other", ["x"], 0)

    purged = log.purge(PURGED)

    assert purged.removed == 6
    if log.promise.writers == "one":
        assert purged.unacknowledged == ("behind",)


def test_a_reader_cannot_purge(logs: Logs, log: Log) -> None:
    reader = logs.reader()
    if reader is not None:
        with pytest.raises(LogReadOnly):
            reader.purge(PURGED)
