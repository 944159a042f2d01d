"""Appending: offsets, group commit, identity, and the state of the disk when `done` is called."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_support import append, offsets_of, raw, sealed_blocks, wait_until
from mesh_fakes import recorded

from zbus import BusConfig
from zbus.errors import ConfigInvalid, LogError, LogLocked, LogReadOnly, LogWriterFailed
from zbus.keys import KeySet
from zbus.ports.log import Refused, Row, Span, Stored, Unknown
from zbus_log import Rules, SqliteLog, open_log
from zbus_log.file import sqlite_driver
from zbus_log.file.database import PAGE_BYTES, WAL_BYTES
from zbus_log.file.tables import BLOCK

EVERYTHING = KeySet(["**"])


def row(publisher: int, sequence: int, key: str = "shop/orders/created", payload: bytes = b"x") -> Row:
    return Row(publisher, sequence, 1_700_000_000_000_000_000 + sequence, key, payload, None)


def identities(log: SqliteLog) -> list[tuple[int, int]]:
    """(publisher, sequence) of every stored event, in the log's order."""
    found, after = [], 0
    while after < log.head():
        page = log.read(EVERYTHING, Span(after), 4096)
        events, error, _ = page.events()
        assert error is None
        found += [event.identity for event in events]
        after = page.covered
    return found


def wal_commits(path: str) -> int:
    """How many transactions the write-ahead log holds: frames that carry a database size."""
    data = Path(f"{path}-wal").read_bytes()
    salt, frames = data[16:24], range(32, len(data) - PAGE_BYTES, PAGE_BYTES + 24)
    return sum(1 for at in frames if data[at + 8 : at + 16] == salt and struct.unpack_from(">I", data, at + 4)[0])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "app.db")


@pytest.fixture
def log(path: str) -> Iterator[SqliteLog]:
    opened = open_log(BusConfig(log=path))
    yield opened
    opened.close(5.0)


# Offsets


def test_offsets_begin_at_one_and_leave_no_gap(log: SqliteLog) -> None:
    offsets = append(log, [row(1, 0)]) + append(log, [row(1, 1), row(2, 0), row(1, 2)]) + append(log, [row(3, 7)])

    assert offsets == [1, 2, 3, 4, 5]
    assert log.head() == 5


def test_offsets_go_on_after_a_restart(path: str) -> None:
    for start in (0, 3, 6):
        log = open_log(BusConfig(log=path))
        assert append(log, [row(1, start + n) for n in range(3)]) == [start + 1, start + 2, start + 3]
        log.close(5.0)


def test_an_append_of_nothing_is_answered_and_uses_no_offset(log: SqliteLog) -> None:
    assert append(log, []) == []
    assert append(log, [row(1, 0)]) == [1]


def test_the_order_of_each_publisher_is_the_order_of_its_appends(log: SqliteLog) -> None:
    def publish(publisher: int) -> None:
        for sequence in range(0, 300, 3):
            append(log, [row(publisher, sequence + n) for n in range(3)])

    threads = [threading.Thread(target=publish, args=(publisher,)) for publisher in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    stored = identities(log)
    assert len(stored) == 1200
    for publisher in range(1, 5):
        assert [sequence for who, sequence in stored if who == publisher] == list(range(300))


# Commits


def test_appends_that_gather_during_a_commit_share_few_transactions(path: str, log: SqliteLog) -> None:
    append(log, [row(1, 0)])
    before, busy, go_on = wal_commits(path), threading.Event(), threading.Event()
    answers: SimpleQueue[Any] = SimpleQueue()

    def hold(_: Any) -> None:  # on the writer's thread, so it is busy for as long as we like
        busy.set()
        assert go_on.wait(20)

    log.append([row(1, 1)], hold, None)
    assert busy.wait(20)
    for sequence in range(2, 502):
        log.append([row(1, sequence)], answers.put, None)
    go_on.set()

    offsets = [list(offsets_of(answers.get(timeout=20))) for _ in range(500)]
    assert offsets == [[offset] for offset in range(3, 503)]
    assert wal_commits(path) - before <= 6  # one for `hold`, then halves of what waits


def test_a_new_key_and_its_first_event_are_one_transaction(path: str, log: SqliteLog) -> None:
    append(log, [row(1, 0)])
    before = wal_commits(path)

    append(log, [row(1, 1, f"new/{n}") for n in range(5)] + [row(2, 0)])

    assert wal_commits(path) - before == 1


def test_what_was_acknowledged_is_seen_by_another_connection_at_once(path: str, log: SqliteLog) -> None:
    seen: SimpleQueue[int] = SimpleQueue()

    def look(_: Any) -> None:
        connection = raw(path)
        seen.put(connection.execute("SELECT max(offset) FROM events").fetchone()[0])
        connection.close()

    log.append([row(1, n) for n in range(10)], look, None)

    assert seen.get(timeout=20) == 10


def test_close_stores_everything_that_was_appended_before_it(path: str) -> None:
    log = open_log(BusConfig(log=path))
    answers: SimpleQueue[Any] = SimpleQueue()
    for sequence in range(2000):
        log.append([row(1, sequence)], answers.put, None)
    log.close(20.0)

    assert answers.qsize() == 2000
    reader = open_log(BusConfig(log=path, read_only=True))
    assert identities(reader) == [(1, sequence) for sequence in range(2000)]
    reader.close(5.0)


def test_an_append_after_close_says_that_it_was_not_stored(log: SqliteLog) -> None:
    log.close(5.0)

    with pytest.raises(LogError, match="closed; the events were not stored"):
        append(log, [row(1, 0)])


def test_a_reader_cannot_append(path: str, log: SqliteLog) -> None:
    reader = open_log(BusConfig(log=path, read_only=True))

    with pytest.raises(LogReadOnly):
        append(reader, [row(1, 0)])

    reader.close(5.0)
    assert log.head() == 0


def test_a_done_that_raises_does_not_stop_the_writer(log: SqliteLog) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("the caller is gone")

    log.append([row(1, 0)], fail, None)

    assert append(log, [row(1, 1)], 5.0) == [2]


def test_a_row_that_cannot_be_stored_fails_its_append_and_the_writer_goes_on(log: SqliteLog) -> None:
    with pytest.raises(LogError):
        append(log, [row(1 << 64, 0)])  # does not fit SQLite's integers

    assert append(log, [row(1, 0)]) == [1]
    assert identities(log) == [(1, 0)]


# Identity


def test_the_same_event_again_returns_its_first_offset(log: SqliteLog) -> None:
    first = append(log, [row(1, 0), row(1, 1)])

    assert append(log, [row(1, 0), row(1, 1)]) == first
    assert append(log, [row(1, 1), row(1, 2)]) == [2, 3]
    assert identities(log) == [(1, 0), (1, 1), (1, 2)]


def test_a_duplicate_inside_one_append_is_stored_once(log: SqliteLog) -> None:
    assert append(log, [row(1, 0), row(2, 0), row(1, 0), row(1, 1), row(2, 0)]) == [1, 2, 1, 3, 2]
    assert identities(log) == [(1, 0), (2, 0), (1, 1)]


def test_a_duplicate_in_appends_that_share_a_commit_is_stored_once(log: SqliteLog) -> None:
    busy, go_on = threading.Event(), threading.Event()
    answers: SimpleQueue[Any] = SimpleQueue()

    def hold(_: Any) -> None:
        busy.set()
        assert go_on.wait(20)

    log.append([row(9, 0)], hold, None)
    assert busy.wait(20)
    for _ in range(3):
        log.append([row(1, 0), row(1, 1)], answers.put, None)
    go_on.set()

    assert [list(offsets_of(answers.get(timeout=20))) for _ in range(3)] == [[2, 3]] * 3
    assert identities(log) == [(9, 0), (1, 0), (1, 1)]


def test_an_event_that_came_late_gets_a_new_offset_and_then_keeps_it(log: SqliteLog) -> None:
    append(log, [row(1, 0), row(1, 1), row(1, 5)])

    assert append(log, [row(1, 3)]) == [4]
    assert append(log, [row(1, 3), row(1, 5), row(1, 6)]) == [4, 3, 5]


def test_identity_holds_across_a_restart(path: str) -> None:
    log = open_log(BusConfig(log=path))
    first = append(log, [row(1, 0), row(2, 0), row(1, 1)])
    log.close(5.0)

    log = open_log(BusConfig(log=path))
    again = append(log, [row(1, 0), row(2, 0), row(1, 1), row(1, 2)])
    log.close(5.0)

    assert again == [*first, 4]


def test_identity_holds_in_sealed_blocks_and_across_a_restart(path: str) -> None:
    events = [row(1 + n % 3, n // 3) for n in range(3 * BLOCK)]
    log = open_log(BusConfig(log=path))
    first = append(log, events)
    wait_until(lambda: sealed_blocks(path) >= 3)
    log.close(5.0)

    log = open_log(BusConfig(log=path))
    some = [0, 1, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK + 7, 3 * BLOCK - 1]
    again = append(log, [events[n] for n in some])
    beyond = append(log, [row(1, BLOCK), row(4, 0)])
    head = log.head()
    log.close(5.0)

    assert again == [first[n] for n in some]
    assert beyond == [3 * BLOCK + 1, 3 * BLOCK + 2]
    assert head == 3 * BLOCK + 2


def test_a_gap_inside_a_sealed_block_is_filled_with_a_new_offset(path: str, log: SqliteLog) -> None:
    append(log, [row(1, 2 * n) for n in range(2 * BLOCK)])  # even sequences only
    wait_until(lambda: sealed_blocks(path) >= 2)

    assert append(log, [row(1, 101), row(1, 100)]) == [2 * BLOCK + 1, 51]
    assert append(log, [row(1, 101)]) == [2 * BLOCK + 1]


def test_identity_holds_when_more_publishers_are_active_than_are_remembered(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.write.identities.PUBLISHERS_KEPT_MAX", 2)
    append(log, [row(publisher, 0) for publisher in range(1, 8)])

    assert append(log, [row(publisher, 0) for publisher in range(1, 8)]) == [1, 2, 3, 4, 5, 6, 7]
    assert append(log, [row(11, 0), row(12, 0), row(13, 0), row(11, 0)]) == [8, 9, 10, 8]


def test_a_forgotten_publisher_beside_a_new_one_is_looked_up_again(
    path: str, log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, [row(1, n) for n in range(2 * BLOCK)])
    wait_until(lambda: sealed_blocks(path) >= 2)
    monkeypatch.setattr("zbus_log.write.identities.PUBLISHERS_KEPT_MAX", 1)

    assert append(log, [row(1, 2 * BLOCK), row(99, 0)]) == [2 * BLOCK + 1, 2 * BLOCK + 2]
    assert append(log, [row(1, 7), row(100, 0)]) == [8, 2 * BLOCK + 3]


# Stored rows


@pytest.mark.parametrize("headers", [None, msgspec.msgpack.encode({"a": "b"})])
def test_an_empty_payload_is_stored_by_itself(log: SqliteLog, headers: bytes | None) -> None:
    assert append(log, [Row(1, 0, 5, "a/b", b"", headers)]) == [1]

    events, _, _ = log.read(EVERYTHING, Span(), 1).events()
    assert [event.payload for event in events] == [b""]


@pytest.fixture(scope="module")
def shared_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteLog]:
    opened = open_log(BusConfig(log=str(tmp_path_factory.mktemp("shared") / "app.db"), durability="os"))
    yield opened
    opened.close(5.0)


sequences = count()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
bodies = st.tuples(
    st.binary(max_size=300) | st.sampled_from([b"", b"\x00", b"\x00" * 50, b"\xff\xfe\x00\x80", "é\x00".encode()]),
    st.none() | st.dictionaries(texts, texts, min_size=1, max_size=4),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 63) - 1),
)


@settings(max_examples=120, deadline=None)
@given(batch=st.lists(bodies, min_size=1, max_size=8))
def test_any_bytes_and_headers_come_back_as_they_went_in(shared_log: SqliteLog, batch: list[Any]) -> None:
    rows = [
        Row(
            publisher,
            next(sequences),
            published_at,
            f"k/{n % 3}",
            payload,
            msgspec.msgpack.encode(headers) if headers else None,
        )
        for n, (payload, headers, publisher, published_at) in enumerate(batch)
    ]
    offsets = append(shared_log, rows)

    events, error, skipped = shared_log.read(EVERYTHING, Span(offsets[0] - 1), len(rows)).events()

    assert (error, skipped) == (None, 0)
    assert [
        (e.publisher_id, e.sequence, e.published_at, e.key, e.payload, dict(e.headers), e.offset) for e in events
    ] == [
        (*msgspec.structs.astuple(row)[:5], headers or {}, offset)
        for row, (_, headers, _, _), offset in zip(rows, batch, offsets, strict=True)
    ]


def test_a_large_payload_comes_back_whole(log: SqliteLog) -> None:
    payload = bytes(range(256)) * (8 * 4096)  # 8 MiB

    append(log, [row(1, 0, payload=payload), row(1, 1, payload=b"")])

    events, _, _ = log.read(EVERYTHING, Span(), 1).events()
    assert events[0].payload == payload


def test_a_key_is_stored_once_however_many_events_it_has(path: str, log: SqliteLog) -> None:
    append(log, [row(1, n, f"shop/{n % 5}") for n in range(500)])
    append(log, [row(1, 500 + n, f"shop/{n % 7}") for n in range(500)])

    connection = raw(path)
    stored = connection.execute("SELECT key FROM keys ORDER BY key").fetchall()
    ids = connection.execute("SELECT count(DISTINCT key) FROM events").fetchone()
    connection.close()
    assert stored == [(f"shop/{n}",) for n in range(7)]
    assert ids == (7,)


def test_keys_are_stored_once_when_more_are_in_use_than_are_remembered(
    path: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("zbus_log.write.writer.KEYS_KEPT_MAX", 3)
    log: SqliteLog = request.getfixturevalue("log")
    for start in (0, 10, 20):
        append(log, [row(1, start + n, f"k/{n}") for n in range(10)])

    connection = raw(path)
    stored = connection.execute("SELECT count(*), count(DISTINCT key) FROM keys").fetchone()
    connection.close()
    assert stored == (10, 10)
    events, _, _ = log.read(EVERYTHING, Span(), 100).events()
    assert [event.key for event in events] == [f"k/{n}" for n in range(10)] * 3


# The table


def test_stored_events_cannot_be_updated_or_deleted(path: str, log: SqliteLog) -> None:
    append(log, [row(1, n) for n in range(10)])
    log.prune(Rules(max_events=6))  # the low-water mark is 4
    connection = raw(path)

    for statement in (
        "UPDATE events SET payload = X'00' WHERE offset = 7",
        "UPDATE events SET offset = 99 WHERE offset = 7",
        "DELETE FROM events WHERE offset = 10",
        "DELETE FROM events WHERE offset = 5",
        "DELETE FROM events",
    ):
        with pytest.raises(sqlite_driver.Error, match="append-only"):
            connection.execute(statement)
    connection.close()

    assert identities(log) == [(1, sequence) for sequence in range(4, 10)]


def test_the_table_is_strict_about_its_types(path: str, log: SqliteLog) -> None:
    connection = raw(path)

    with pytest.raises(sqlite_driver.Error, match="cannot store TEXT value in INTEGER column"):
        connection.execute("INSERT INTO events VALUES (1, 'one', 0, 0, 1, 0, NULL, X'')")
    with pytest.raises(sqlite_driver.Error, match="cannot store TEXT value in BLOB column"):
        connection.execute("INSERT INTO events VALUES (1, 1, 0, 0, 1, 0, NULL, 'text')")
    connection.close()

    assert append(log, [row(1, 0)]) == [1]


@pytest.mark.parametrize(("durability", "level"), [("fsync", 2), ("os", 1)])
def test_the_writer_syncs_as_much_as_the_durability_promises(path: str, durability: Any, level: int) -> None:
    log = open_log(BusConfig(log=path, durability=durability))
    found: SimpleQueue[Any] = SimpleQueue()

    def look() -> None:
        connection = log._writing
        found.put(
            [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("synchronous", "journal_mode")]
        )

    log._owner.run(look)
    before = found.get(timeout=20)
    append(log, [row(1, n) for n in range(2 * BLOCK)])
    wait_until(lambda: sealed_blocks(path) >= 2)  # only sealing itself syncs less
    log._owner.run(look)
    after = found.get(timeout=20)
    log.close(5.0)

    assert before == after == [level, "wal"]


def test_a_sqlite_that_loses_commits_is_refused_with_the_line_that_helps(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_driver, "sqlite_version_info", (3, 51, 2))
    monkeypatch.setattr(sqlite_driver, "sqlite_version", "3.51.2")

    with pytest.raises(ConfigInvalid) as caught:
        open_log(BusConfig(log=path))

    assert caught.value.field == "log"
    assert "3.51.2" in caught.value.reason
    assert "pip install --force-reinstall --only-binary=apsw 'apsw>=3.51.3'" in caught.value.reason
    assert not Path(path).exists()


def test_the_write_ahead_log_has_its_length_from_the_start(path: str, log: SqliteLog) -> None:
    """A commit that makes the file longer costs twice as much; readers and recovery do not mind the zeros."""
    append(log, [row(1, 0)])
    length = Path(f"{path}-wal").stat().st_size

    append(log, [row(1, sequence) for sequence in range(1, 500)])

    assert length == Path(f"{path}-wal").stat().st_size >= WAL_BYTES
    with closing(sqlite_driver.connect(f"file:{path}?mode=ro")) as other:
        assert other.execute("SELECT count(*) FROM events").fetchone() == (500,)


def test_a_commit_that_fails_and_cannot_be_looked_up_has_an_unknown_outcome(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, [row(1, 0)])
    writer = log._owner

    def fail(*_: object) -> None:
        raise sqlite_driver.Error("the disk does not answer")

    monkeypatch.setattr(writer, "_insert", fail)
    monkeypatch.setattr(writer._identities, "forget", fail)
    answers: SimpleQueue[Any] = SimpleQueue()
    log.append([row(1, 1)], answers.put, "mine")
    answer = answers.get(timeout=20)

    assert answer.about == "mine"
    assert isinstance(answer.outcome, Unknown)
    assert "outcome is unknown" in str(answer.outcome.error)


def test_a_commit_that_fails_and_was_looked_up_is_refused(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, [row(1, 0)])

    def fail(*_: object) -> None:
        raise sqlite_driver.Error("not now")

    monkeypatch.setattr(log._owner, "_insert", fail)
    answers: SimpleQueue[Any] = SimpleQueue()
    log.append([row(1, 1)], answers.put, None)

    outcome = answers.get(timeout=20).outcome
    assert isinstance(outcome, Refused)
    assert outcome.error.outcome == "refused"
    assert str(outcome.error).endswith("not now; the events were not stored")
    monkeypatch.undo()
    assert append(log, [row(1, 1)]) == [2]


# A second writer


def store_as_another_writer(path: str, offset: int) -> None:
    connection = raw(path)
    connection.execute("INSERT INTO keys (key) VALUES ('theirs')")
    connection.execute("INSERT INTO events VALUES (?, 99, 0, 0, 1, 0, NULL, X'00')", (offset,))
    connection.close()


def test_an_event_at_an_offset_that_another_writer_used_is_not_acknowledged(path: str, log: SqliteLog) -> None:
    store_as_another_writer(path, offset=1)

    for sequence in (0, 1):  # the writer has stopped
        with pytest.raises(LogWriterFailed, match="another process writes to it"):
            append(log, [row(1, sequence)])

    assert raw(path).execute("SELECT publisher, sequence FROM events").fetchall() == [(99, 0)]


def test_a_failed_commit_is_not_acknowledged_for_the_event_of_another_writer(
    path: str, log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        store_as_another_writer(path, offset=1)
        raise sqlite_driver.Error("not now")

    monkeypatch.setattr(log._owner, "_insert", fail)
    answers: SimpleQueue[Any] = SimpleQueue()
    log.append([row(1, 0)], answers.put, None)

    assert isinstance(answers.get(timeout=20).outcome, Refused)


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_writer_whose_head_record_is_gone_stops_before_it_uses_an_offset(
    path: str, log: SqliteLog, replaced: bool
) -> None:
    Path(f"{path}-head").unlink()
    if replaced:  # another process can own the log now
        other = open_log(BusConfig(log=path))
        assert append(other, [row(2, 0)]) == [1]

    with pytest.raises(LogWriterFailed, match="-head was removed or replaced"):
        append(log, [row(1, 0)])

    if replaced:
        assert append(other, [row(2, 1)]) == [2]
        other.close(5.0)


def test_a_new_publisher_does_not_make_the_writer_read_its_tail_again(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, [row(1, 0)])
    monkeypatch.setattr(log._owner._identities, "forget", lambda: pytest.fail("the tail is read again"))

    assert [append(log, [row(publisher, 0)])[0] for publisher in range(2, 30)] == list(range(2, 30))


def test_a_callback_that_fails_is_recorded_and_the_others_are_called(log: SqliteLog, path: str) -> None:
    def fail(answer: object) -> None:
        raise RuntimeError("a bug of the caller")

    with recorded() as records:
        log.append([row(7, 0)], fail)
        assert append(log, [row(7, 1)]) == [2]

    assert [(each["record"], each["error"]) for each in records] == [
        ("LOG_TASK_FAILED", "RuntimeError: a bug of the caller")
    ]


def test_work_of_the_writer_that_fails_is_recorded_and_the_log_continues(log: SqliteLog, path: str) -> None:
    def fail() -> None:
        raise RuntimeError("a bug of ours")

    with recorded() as records:
        log._writer.run(fail)  # type: ignore[union-attr]
        assert append(log, [row(7, 0)]) == [1]

    assert [(each["record"], each["path"]) for each in records] == [("LOG_TASK_FAILED", path)]


def test_an_unexpected_error_stops_the_writer_and_is_recorded(
    log: SqliteLog, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("a bug of ours")

    answers: SimpleQueue[Any] = SimpleQueue()
    monkeypatch.setattr(log._writer, "_store", fail)
    with recorded() as records:
        log.append([row(7, 0)], answers.put)
        outcome = answers.get(timeout=10).outcome

    assert isinstance(outcome, Unknown)
    assert [(each["record"], each["level"], each["path"]) for each in records] == [
        ("LOG_WRITER_FAILED", logging.CRITICAL, path)
    ]


def test_a_writer_that_ends_after_close_gave_up_frees_the_log(path: str) -> None:
    log = open_log(BusConfig(log=path))
    append(log, [row(1, 0)])
    answers: SimpleQueue[Any] = SimpleQueue()
    other = sqlite_driver.connect(path)
    other.execute("BEGIN IMMEDIATE")
    log.append([row(1, 1)], answers.put, None)
    log.close(0.2)
    with pytest.raises(LogLocked):
        open_log(BusConfig(log=path))

    other.close()
    log._owner._thread.join(20)

    assert isinstance(answers.get(timeout=20).outcome, Stored)
    again = open_log(BusConfig(log=path))
    assert identities(again) == [(1, 0), (1, 1)]
    again.close(5.0)
    assert not Path(f"{path}-wal").exists()
