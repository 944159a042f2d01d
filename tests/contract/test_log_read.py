"""The log port: pages of events by offsets, times and keys, that never skip one."""

from __future__ import annotations

import random
import threading
from itertools import pairwise

import pytest
from log_contract import EVERYTHING, Logs, append, follow, rows, wait_until

from zbus.errors import LogTrimmed
from zbus.keys import KeySet
from zbus.ports.log import Log, Row, Span, Stored

KEYS = ["a", "a/b", "a/b/c", "b/c", "x/y"]


@pytest.fixture
def stored(log: Log) -> list[tuple[Row, int]]:
    """Three hundred events with their offsets. Their keys come in no order, and their clocks go back at times."""
    dice = random.Random(3)
    batch = [
        Row(dice.choice((1, 2, 3)), n, 1_000 + 10 * n - dice.choice((0, 0, 500)), dice.choice(KEYS), b"%d" % n)
        for n in range(300)
    ]
    return list(zip(batch, append(log, batch).offsets, strict=True))


def head_of(stored: list[tuple[Row, int]]) -> int:
    return stored[-1][1]


@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
def test_pages_have_every_event_once_and_in_order_whatever_their_size(
    log: Log, stored: list[tuple[Row, int]], limit: int
) -> None:
    found = follow(log, head_of(stored), limit=limit)

    assert [(event.offset, event.payload) for event in found] == [(offset, row.payload) for row, offset in stored]


@pytest.mark.parametrize("expressions", [["a/**"], ["*/c"], ["a", "x/*"], ["a/b/c"], ["nothing/here"], ["a/**", "**"]])
def test_pages_have_the_events_of_some_keys_exactly(
    log: Log, stored: list[tuple[Row, int]], expressions: list[str]
) -> None:
    keys = KeySet(expressions)

    found = follow(log, head_of(stored), keys, limit=20)

    assert [event.offset for event in found] == [offset for row, offset in stored if row.key in keys]


def test_a_span_has_the_offsets_after_its_start_up_to_and_including_its_end(
    log: Log, stored: list[tuple[Row, int]]
) -> None:
    after, until = stored[99][1], stored[199][1]

    found = follow(log, until, span=Span(after, until), limit=30)

    assert [event.offset for event in found] == [offset for _, offset in stored[100:200]]


def test_a_span_that_ends_between_two_events_is_covered_to_its_end(log: Log, stored: list[tuple[Row, int]]) -> None:
    """Offsets may have gaps: the end need not be the offset of an event."""
    for until in range(stored[49][1], stored[60][1]):
        found = follow(log, until, span=Span(stored[39][1], until))

        assert [event.offset for event in found] == [offset for _, offset in stored[40:] if offset <= until]


def test_a_start_between_two_events_is_as_good_as_any(log: Log, stored: list[tuple[Row, int]]) -> None:
    for after in range(stored[49][1], stored[52][1]):
        found = follow(log, stored[60][1], span=Span(after, stored[60][1]))

        assert [event.offset for event in found] == [offset for _, offset in stored[:61] if offset > after]


@pytest.mark.parametrize(("from_ns", "to_ns"), [(2_000, None), (None, 2_000), (1_500, 2_500), (9_000, None), (0, 1)])
def test_a_span_of_time_includes_both_ends_and_clocks_may_go_back(
    log: Log, stored: list[tuple[Row, int]], from_ns: int | None, to_ns: int | None
) -> None:
    expected = [
        offset
        for row, offset in stored
        if (from_ns is None or row.published_at >= from_ns) and (to_ns is None or row.published_at <= to_ns)
    ]

    found = follow(log, head_of(stored), span=Span(from_ns=from_ns, to_ns=to_ns), limit=50)

    assert [event.offset for event in found] == expected


def test_a_narrowed_span_has_the_same_events_and_an_end(log: Log, stored: list[tuple[Row, int]]) -> None:
    wait_until(lambda: log.head() == head_of(stored))
    span = Span(from_ns=1_500, to_ns=2_500)
    narrowed = log.narrow(span)
    expected = [offset for row, offset in stored if 1_500 <= row.published_at <= 2_500]

    assert narrowed.until is not None
    assert 0 <= narrowed.after <= narrowed.until <= head_of(stored)
    assert [event.offset for event in follow(log, narrowed.until, span=narrowed)] == expected
    assert log.narrow(Span()).until == head_of(stored)
    assert log.narrow(Span(until=head_of(stored) + 1000)).until == head_of(stored)
    assert log.narrow(Span(until=stored[10][1])).until == stored[10][1]


def test_a_start_in_time_becomes_the_position_before_the_first_event_that_is_late_enough(
    log: Log, stored: list[tuple[Row, int]]
) -> None:
    for from_ns in (0, 1_000, 1_505, 2_000, 3_333):
        first = next(offset for row, offset in stored if row.published_at >= from_ns)
        found = follow(log, first, span=Span(log.narrow(Span(from_ns=from_ns)).after))

        assert found[0].offset == first
    beyond = log.narrow(Span(from_ns=1_000_000))
    assert beyond.after == beyond.until == head_of(stored)


def test_a_page_at_the_end_is_empty_and_goes_no_further(log: Log, stored: list[tuple[Row, int]]) -> None:
    wait_until(lambda: log.head() == head_of(stored))

    page = log.read(EVERYTHING, Span(head_of(stored)), 10)

    assert page.events() == ([], None, 0)
    assert page.covered == head_of(stored)
    assert log.read(EVERYTHING, Span(head_of(stored) + 100), 10).covered == head_of(stored) + 100


def test_an_empty_log_has_an_empty_page(log: Log) -> None:
    page = log.read(EVERYTHING, Span(), 10)

    assert (page.events(), page.covered, page.low_water) == (([], None, 0), 0, 0)
    assert log.head() == log.low_water() == 0


def test_the_head_never_goes_back_and_reaches_what_was_acknowledged(log: Log) -> None:
    heads = []
    for number in range(30):
        acknowledged = append(log, rows(20, publisher=number)).offsets[-1]
        heads.append(log.head())
        assert heads[-1] <= acknowledged

    wait_until(lambda: log.head() == acknowledged)
    assert all(before <= after for before, after in pairwise(heads))


def test_a_reader_never_skips_an_event_however_stale_its_reads_are(log: Log) -> None:
    """It reads while another thread appends, and takes each page at its word."""
    last: list[int] = []

    def run() -> None:
        for number in range(60):
            last[:] = append(log, rows(10, start=10 * number)).offsets[-1:]

    thread = threading.Thread(target=run)
    thread.start()
    found, after = [], 0
    while thread.is_alive() or after < last[0]:
        page = log.read(EVERYTHING, Span(after), 33)
        events, error, _ = page.events()
        assert error is None
        found += [event.sequence for event in events]
        after = page.covered
    thread.join()

    assert found == list(range(600))


def test_what_retention_removed_is_said_and_not_skipped(logs: Logs, log: Log, stored: list[tuple[Row, int]]) -> None:
    low_water = stored[99][1]
    wait_until(lambda: log.head() == head_of(stored))
    logs.trim(log, low_water)

    with pytest.raises(LogTrimmed) as caught:
        log.read(EVERYTHING, Span(stored[49][1]), 10)
    from_the_beginning = follow(log, head_of(stored))
    at_the_edge = follow(log, head_of(stored), span=Span(low_water))

    assert (caught.value.after, caught.value.low_water) == (stored[49][1], low_water)
    assert log.low_water() == low_water == log.read(EVERYTHING, Span(low_water), 1).low_water
    assert [event.offset for event in from_the_beginning] == [offset for _, offset in stored[100:]]
    assert [event.offset for event in at_the_edge] == [offset for _, offset in stored[100:]]
    assert log.head() == head_of(stored)


def test_offsets_go_on_after_everything_was_removed(logs: Logs, log: Log) -> None:
    offsets = append(log, rows(50)).offsets
    wait_until(lambda: log.head() == offsets[-1])
    logs.trim(log, offsets[-1])

    after = append(log, rows(1, start=50)).offsets[0]

    assert after > offsets[-1]
    assert [event.offset for event in follow(log, after)] == [after]


def test_headers_and_provenance_come_back(log: Log) -> None:
    from msgspec.msgpack import encode

    from zbus.event import Provenance

    came = Provenance(77, 12, (3, 5), "hall")
    batch = [
        Row(1, 0, 5, "a/b", b"\0\xff", encode({"trace": "é"}), came),
        Row(1, 1, 6, "a/b", b"", None, None),
    ]
    stored = append(log, batch)
    assert isinstance(stored, Stored)

    first, second = follow(log, stored.offsets[-1])

    assert (first.payload, dict(first.headers), first.provenance) == (b"\0\xff", {"trace": "é"}, came)
    assert (second.payload, dict(second.headers), second.provenance) == (b"", {}, None)


def test_a_log_that_is_only_read_shows_what_its_writer_appends(logs: Logs, log: Log) -> None:
    append(log, rows(10))
    reader = logs.reader()
    if reader is None:
        assert log.promise.durability == "nothing"
        return
    heads: list[int] = []
    reader.watch(heads.append)
    head = append(log, rows(10, start=10)).offsets[-1]

    wait_until(lambda: head in heads)
    assert [event.sequence for event in follow(reader, head)] == list(range(20))
