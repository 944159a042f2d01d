"""Reading: by offset, by time and by key expression, complete, bounded, and beside the writer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_support import append, raw, sealed_blocks, wait_until

from zbus import BusConfig, Event
from zbus.errors import EventCorrupt, LogTrimmed
from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus_log import Rules, SqliteLog, open_log
from zbus_log.file.database import make_engine, snapshot
from zbus_log.file.key_table import KeyTable
from zbus_log.file.tables import BLOCK
from zbus_log.read.reader import PAGE_BYTES_MAX, WINDOW_MIN

EVERYTHING = KeySet(["**"])
WHOLE = Span()
SECOND = 1_000_000_000


def row(sequence: int, key: str = "a/b", payload: bytes = b"x", at: int = 0) -> Row:
    return Row(1, sequence, at or sequence, key, payload, None)


def follow(log: SqliteLog, keys: KeySet, span: Span = WHOLE, limit: int = 1000) -> list[Event]:
    """Read a span to its end, page by page, as a replay does."""
    found: list[Event] = []
    span = log.narrow(span)
    assert span.until is not None
    while span.after < span.until:
        page = log.read(keys, span, limit)
        events, error, skipped = page.events()
        assert (error, skipped) == (None, 0)
        assert len(events) <= limit
        assert page.covered > span.after, "a page without progress would be read again forever"
        found += events
        span = span._replace(after=page.covered)
    return found


def damage(path: str, statement: str) -> None:
    """Change a log behind its back, as a bad disk would."""
    connection = raw(path)
    for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute(statement)
    assert connection.changes() > 0
    connection.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "app.db")


@pytest.fixture
def log(path: str) -> Iterator[SqliteLog]:
    opened = open_log(BusConfig(log=path))
    yield opened
    opened.close(5.0)


# A large log for many queries: sealed blocks and an unsealed end, keys of every shape, clocks that jump.


class Stored(NamedTuple):
    log: SqliteLog
    rows: list[Row]  # the row at index n has the offset n + 1


SEGMENTS = ["a", "b", "c", "ab", "abc", "x", "é", "a-b", "0", "z~"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    path = str(tmp_path_factory.mktemp("stored") / "app.db")
    dice = random.Random(7)
    keys = sorted({"/".join(dice.choices(SEGMENTS, k=dice.choice([1, 2, 2, 3, 3, 4]))) for _ in range(150)})
    clock, rows = 1000 * SECOND, []
    for sequence in range(3 * BLOCK + 500):
        clock += dice.choice([0, 1, 5]) if dice.random() > 0.002 else dice.randint(-5000, 5000)
        rows.append(row(sequence, dice.choice(keys), str(sequence).encode(), clock))
    log = open_log(BusConfig(log=path, durability="os"))
    for at in range(0, len(rows), 1000):
        append(log, rows[at : at + 1000])
    wait_until(lambda: sealed_blocks(path) >= 3)
    yield Stored(log, rows)
    log.close(5.0)


segments = st.sampled_from([*SEGMENTS, "*", "**", "a$*", "$*b", "$*"])
expressions = st.lists(st.lists(segments, min_size=1, max_size=4).map("/".join), min_size=1, max_size=3)
offsets = st.integers(0, 3 * BLOCK + 600)


@settings(max_examples=60, deadline=None)
@given(wanted=expressions, after=offsets, until=st.none() | offsets, limit=st.sampled_from([1, 7, 500, 4000]))
def test_pages_cover_what_an_expression_asks_for_exactly_once(
    stored: Stored, wanted: list[str], after: int, until: int | None, limit: int
) -> None:
    keys = KeySet(wanted)
    last = len(stored.rows) if until is None else until
    after = max(after, last - 300) if limit == 1 else after  # a page for each event is slow
    expected = [n + 1 for n, stored_row in enumerate(stored.rows) if after < n + 1 <= last and stored_row.key in keys]

    found = follow(stored.log, keys, Span(after, until), limit)

    assert [event.offset for event in found] == expected
    assert all(stored.rows[event.offset - 1].key == event.key for event in found)
    assert all(stored.rows[event.offset - 1].payload == event.payload for event in found)


moments = st.none() | st.tuples(st.integers(0, 3 * BLOCK + 499), st.integers(-1, 1))


@settings(max_examples=60, deadline=None)
@given(wanted=expressions, start=moments, end=moments, after=offsets | st.just(0))
def test_times_are_exact_also_where_clocks_went_backwards(
    stored: Stored, wanted: list[str], start: tuple[int, int] | None, end: tuple[int, int] | None, after: int
) -> None:
    keys = KeySet(wanted)
    from_ns, to_ns = (None if at is None else stored.rows[at[0]].published_at + at[1] for at in (start, end))
    expected = [
        n + 1
        for n, each in enumerate(stored.rows)
        if n + 1 > after
        and each.key in keys
        and (from_ns is None or each.published_at >= from_ns)
        and (to_ns is None or each.published_at <= to_ns)
    ]

    found = follow(stored.log, keys, Span(after, None, from_ns, to_ns), 2000)

    assert [event.offset for event in found] == expected


def test_a_span_of_time_is_narrowed_to_the_blocks_that_can_hold_it(path: str, log: SqliteLog) -> None:
    append(log, [row(n, at=1000 + 10 * n) for n in range(4 * BLOCK)])
    wait_until(lambda: sealed_blocks(path) >= 4)
    middle = 1000 + 10 * (2 * BLOCK + 100)

    narrowed = log.narrow(Span(from_ns=middle, to_ns=middle + 50))

    assert narrowed.until is not None
    assert narrowed.after == 2 * BLOCK + 100
    assert narrowed.until <= 3 * BLOCK
    beyond = log.narrow(Span(from_ns=1000 + 40 * BLOCK))
    assert beyond.after == beyond.until == 4 * BLOCK


def test_an_expression_that_matches_nothing_comes_to_an_end(stored: Stored) -> None:
    assert follow(stored.log, KeySet(["nobody/**"])) == []


def test_a_limit_is_the_size_of_a_page_and_covered_says_where_to_go_on(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(10)])

    page = log.read(EVERYTHING, Span(2, 9), 3)

    assert [event.offset for event in page.events()[0]] == [3, 4, 5]
    assert page.covered == 5
    assert [event.offset for event in log.read(EVERYTHING, Span(5, 9), 100).events()[0]] == [6, 7, 8, 9]
    assert log.read(EVERYTHING, Span(10), 100).events()[0] == []


def test_an_empty_log_has_an_empty_page(log: SqliteLog) -> None:
    page = log.read(EVERYTHING, Span(), 10)

    assert page.events() == ([], None, 0)
    assert (page.covered, log.head(), log.low_water()) == (0, 0, 0)


def test_a_wildcard_does_not_match_a_segment_that_starts_with_an_at_sign(log: SqliteLog) -> None:
    append(log, [row(0, "a/@x/c"), row(1, "a/b/c"), row(2, "a/@x")])

    for wanted in ("**", "a/**", "a/*/c", "a/@x/*", "a/@x/**"):
        keys = KeySet([wanted])
        expected = [n + 1 for n, key in enumerate(["a/@x/c", "a/b/c", "a/@x"]) if key in keys]
        assert [event.offset for event in follow(log, keys)] == expected, wanted


def test_keys_at_the_edges_of_unicode_are_found_by_their_beginning(log: SqliteLog) -> None:
    keys = ["a\U0010ffffb", "a\uffff", "a\x21", "a/\U0010ffff", "\U0010ffff\U0010ffff/x"]
    append(log, [row(n, key) for n, key in enumerate(keys)])

    for wanted in ("a$*", "a$*/**", "a/*", "*/x", "*", "**/x"):
        expected = [n + 1 for n, key in enumerate(keys) if key in KeySet([wanted])]
        assert [event.offset for event in follow(log, KeySet([wanted]))] == expected, wanted


def test_names_are_known_when_a_log_has_more_keys_than_are_remembered(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.file.key_table.NAMES_KEPT_MAX", 3)
    append(log, [row(n, f"k/{n}") for n in range(3)])
    assert len(follow(log, EVERYTHING)) == 3
    append(log, [row(3, "k/0"), row(4, "k/3"), row(5, "k/1")])

    found = follow(log, EVERYTHING, Span(3))

    assert [event.key for event in found] == ["k/0", "k/3", "k/1"]


# The cost of a read


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_a_replay_of_one_key_in_a_hundred_does_not_read_all_payloads(path: str, log: SqliteLog) -> None:
    dice, size = random.Random(1), 5 * BLOCK + 10
    rows = [row(n, f"k/{dice.randrange(100)}", n.to_bytes(2000, "big")) for n in range(size)]
    for at in range(0, size, 4000):
        append(log, rows[at : at + 4000])
    wait_until(lambda: sealed_blocks(path) >= 5)

    def cost(keys: KeySet) -> tuple[int, int]:
        reader = open_log(BusConfig(log=path, read_only=True))  # nothing of it is in a cache yet
        before = bytes_read()
        found = len(follow(reader, keys, limit=500))
        after = bytes_read()
        reader.close(5.0)
        return found, after - before

    everything, all_bytes = cost(EVERYTHING)
    some, some_bytes = cost(KeySet(["k/42"]))

    assert everything == size
    assert some == sum(stored_row.key == "k/42" for stored_row in rows)
    assert all_bytes > size * 2000  # what is measured are indeed the payloads
    assert some_bytes < all_bytes / 5


def test_a_page_is_bounded_by_bytes(log: SqliteLog) -> None:
    mebibyte = 1024 * 1024
    append(log, [row(n, payload=bytes([n]) * mebibyte) for n in range(20)])

    seen: list[int] = []
    while len(seen) < 20:
        page = log.read(EVERYTHING, Span(seen[-1] if seen else 0), 1000)
        events, error, _ = page.events()
        assert error is None
        assert 0 < sum(len(event.payload) for event in events) <= PAGE_BYTES_MAX
        assert page.covered == events[-1].offset or len(seen) + len(events) == 20
        seen += [event.offset for event in events]

    assert seen == list(range(1, 21))


def test_an_event_larger_than_a_page_is_served_alone(log: SqliteLog) -> None:
    huge = b"h" * (PAGE_BYTES_MAX + 1)
    append(log, [row(0), row(1, payload=huge), row(2)])

    found = follow(log, EVERYTHING)

    assert [event.offset for event in found] == [1, 2, 3]
    assert found[1].payload == huge


def test_headers_count_towards_the_bytes_of_a_page(log: SqliteLog) -> None:
    headers = msgspec.msgpack.encode({"note": "h" * 1024 * 1024})
    append(log, [Row(1, n, n, "a/b", b"x", headers) for n in range(20)])

    events, error, _ = log.read(EVERYTHING, Span(), 1000).events()

    assert error is None
    assert 0 < len(events) * 1024 * 1024 <= PAGE_BYTES_MAX


# Beside the writer


@pytest.mark.parametrize("expression", ["**", "k/**", "k/*/x"])
def test_a_reader_beside_a_writer_that_never_stops_misses_nothing(log: SqliteLog, expression: str) -> None:
    keys, wanted, stop, sequences = KeySet([expression]), 1000, threading.Event(), count()

    def write() -> None:
        while not stop.is_set():
            append(log, [row(sequence, f"k/{sequence}/x") for sequence in [next(sequences) for _ in range(3)]])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen: list[int] = []
        after, deadline = 0, time.monotonic() + 30
        while len(seen) < wanted and time.monotonic() < deadline:
            page = log.read(keys, Span(after), 100)
            seen += [event.offset for event in page.events()[0]]
            after = page.covered
    finally:
        stop.set()
        writer.join(20)

    assert len(seen) >= wanted
    assert seen == list(range(1, len(seen) + 1))


def test_a_key_that_is_new_while_a_page_is_read_is_not_passed_over(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, look_up, late = KeySet(["k/**"]), log._reader._keys.matching, iter([[row(1, "k/new")]])
    append(log, [row(0, "k/old")])

    def look_up_then_append(*arguments: Any) -> Any:  # the writer commits between the two steps of a read
        found = look_up(*arguments)
        for rows in late:
            append(log, rows)
        return found

    monkeypatch.setattr(log._reader._keys, "matching", look_up_then_append)
    first = log.read(keys, Span(0), 10)
    second = log.read(keys, Span(first.covered), 10)

    assert [event.key for page in (first, second) for event in page.events()[0]] == ["k/old", "k/new"]


def test_a_page_keeps_what_it_read_while_the_log_goes_on(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(5)])
    page = log.read(EVERYTHING, Span(), 100)
    append(log, [row(n) for n in range(5, 10)])
    log.prune(Rules(max_events=1))

    assert [event.offset for event in page.events()[0]] == [1, 2, 3, 4, 5]
    assert page.covered == 5


# After retention


def test_reading_what_retention_removed_says_so(log: SqliteLog) -> None:
    append(log, [row(n, f"k/{n % 2}") for n in range(100)])
    log.prune(Rules(max_events=40))

    for keys in (EVERYTHING, KeySet(["k/0"])):
        for request in (lambda keys=keys: log.read(keys, Span(10), 10), lambda: log.narrow(Span(10))):
            with pytest.raises(LogTrimmed) as caught:
                request()
            assert (caught.value.after, caught.value.low_water) == (10, 60)


def test_reading_from_the_beginning_starts_with_what_is_left(log: SqliteLog) -> None:
    append(log, [row(n, f"k/{n % 2}") for n in range(100)])
    log.prune(Rules(max_events=40))

    assert [event.offset for event in follow(log, EVERYTHING)] == list(range(61, 101))
    assert [event.offset for event in follow(log, KeySet(["k/0"]))] == list(range(61, 101, 2))
    assert [event.offset for event in follow(log, EVERYTHING, Span(60))] == list(range(61, 101))


def test_reading_some_keys_from_the_beginning_goes_past_a_long_trimmed_part(log: SqliteLog) -> None:
    size = WINDOW_MIN + BLOCK
    append(log, [row(n, "k/often") for n in range(size)] + [row(size, "k/rare")])
    log.prune(Rules(max_events=100))

    assert [event.offset for event in follow(log, KeySet(["k/rare"]))] == [size + 1]


# Bad rows


def test_a_bad_event_is_reported_with_its_offset_after_those_before_it(path: str, log: SqliteLog) -> None:
    append(log, [row(n) for n in range(10)])
    damage(path, "UPDATE events SET payload = X'79' WHERE offset = 6")

    events, error, skipped = log.read(EVERYTHING, Span(), 100).events()

    assert [event.offset for event in events] == [1, 2, 3, 4, 5]
    assert isinstance(error, EventCorrupt)
    assert (error.offset, skipped) == (6, 0)


def test_a_bad_event_is_skipped_on_request_and_counted(path: str, log: SqliteLog) -> None:
    append(log, [row(n) for n in range(10)])
    damage(path, "UPDATE events SET payload = X'79' WHERE offset IN (3, 6)")

    page = log.read(EVERYTHING, Span(), 100)
    events, error, skipped = page.events(skip_corrupt=True)

    assert [event.offset for event in events] == [1, 2, 4, 5, 7, 8, 9, 10]
    assert (error, skipped, page.covered) == (None, 2, 10)


@pytest.mark.parametrize(
    "change",
    [
        "publisher = publisher + 1",
        "sequence = sequence + 1",
        "published_at = published_at + 1",
        "key = (SELECT max(id) FROM keys)",
        "checksum = checksum + 1",
        "headers = X'80'",
        "payload = CAST(payload || X'00' AS BLOB)",
        "payload = X''",
    ],
)
def test_a_change_to_any_field_of_an_event_is_noticed(path: str, log: SqliteLog, change: str) -> None:
    append(log, [row(0), row(1), row(2, "c/d")])
    damage(path, f"UPDATE events SET {change} WHERE offset = 2")

    events, error, _ = log.read(EVERYTHING, Span(), 100).events()

    assert [event.offset for event in events] == [1]
    assert isinstance(error, EventCorrupt)
    assert error.offset == 2


def test_an_event_whose_key_is_gone_is_reported_as_corrupt(path: str, log: SqliteLog) -> None:
    append(log, [row(0), row(1, "c/d"), row(2)])
    damage(path, "DELETE FROM keys WHERE key = 'c/d'")

    events, error, _ = log.read(EVERYTHING, Span(), 100).events()

    assert [event.offset for event in events] == [1]
    assert isinstance(error, EventCorrupt)
    assert error.offset == 2


def test_a_flipped_bit_in_the_file_is_noticed(path: str) -> None:
    log = open_log(BusConfig(log=path))
    append(log, [row(n, payload=b"payload-%d" % n) for n in range(10)])
    log.close(5.0)
    data = bytearray(Path(path).read_bytes())
    data[data.index(b"payload-4")] ^= 0x20
    Path(path).write_bytes(data)

    log = open_log(BusConfig(log=path))
    events, error, _ = log.read(EVERYTHING, Span(), 100).events()
    log.close(5.0)

    assert len(events) == 4
    assert isinstance(error, EventCorrupt)
    assert error.offset == 5


def test_a_reader_with_an_older_view_does_not_make_keys_count_twice(log: SqliteLog, path: str) -> None:
    """Two threads read for the same keys, and the one whose view is older comes last."""
    append(log, [row(0, key="k/0")])
    older, newer = make_engine(path, read_only=True), make_engine(path, read_only=True)
    with older.connect() as behind, newer.connect() as ahead, snapshot(behind):
        behind.exec_driver_sql("SELECT max(id) FROM keys").scalar_one()  # its view begins here
        append(log, [row(1, key="k/1")])
        keys, table = KeySet(["k/*"]), KeyTable()

        table.matching(ahead, keys)
        table.matching(behind, keys)
        found = table.matching(ahead, keys)

        assert found.ids is not None
        assert sorted(found.ids) == [1, 2]
        assert (found.keys, found.matching) == (2, 2)
    older.dispose()
    newer.dispose()
