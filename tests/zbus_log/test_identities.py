"""Identities: conflicts with stored events, the memory of removed ones, and rows that cannot be encoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from log_support import append, ask, raw, sealed_blocks, wait_until

from zbus import BusConfig
from zbus.errors import LogError
from zbus.keys import KeySet
from zbus.ports.log import Refused, Row, Stored
from zbus_log import Rules, SqliteLog, open_log
from zbus_log.file.database import make_engine
from zbus_log.file.tables import BLOCK
from zbus_log.write import identities, removed_identities
from zbus_log.write.removed_identities import RemovedIdentities


def row(publisher: int, sequence: Any, key: Any = "a/b", payload: Any = b"x", headers: Any = None) -> Row:
    return Row(publisher, sequence, 1, key, payload, headers)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "app.db")


@contextmanager
def opened(path: str, **more: Any) -> Iterator[SqliteLog]:
    log = open_log(BusConfig(log=path, durability="os", **more))
    try:
        yield log
    finally:
        log.close(5.0)


@pytest.fixture
def log(path: str) -> Iterator[SqliteLog]:
    with opened(path) as log:
        yield log


def stored(log: SqliteLog, rows: list[Row]) -> Stored:
    answers: SimpleQueue[Any] = SimpleQueue()
    log.append(rows, answers.put, None)
    outcome = answers.get(timeout=20).outcome
    assert isinstance(outcome, Stored), outcome
    return outcome


def together(log: SqliteLog, *appends: list[Row]) -> list[Any]:
    """The outcomes of appends that share one commit."""
    busy, go_on = threading.Event(), threading.Event()
    answers: SimpleQueue[Any] = SimpleQueue()

    def hold(_: Any) -> None:
        busy.set()
        assert go_on.wait(20)

    log.append([row(99, time.monotonic_ns())], hold, None)
    assert busy.wait(20)
    for number, each in enumerate(appends):
        log.append(each, answers.put, number)
    go_on.set()
    found = [answers.get(timeout=20) for _ in appends]
    return [answer.outcome for answer in sorted(found, key=lambda answer: answer.about)]


# Conflicts


def test_a_conflict_with_an_event_in_a_sealed_block_is_found_after_a_restart(path: str) -> None:
    with opened(path) as log:
        append(log, [row(1, n, f"k/{n % 7}", b"%d" % n) for n in range(2 * BLOCK)])
        wait_until(lambda: sealed_blocks(path) >= 2)
    with opened(path) as log:
        again = stored(log, [row(1, 5, "k/5", b"5"), row(1, 6, "k/6", b"other"), row(1, 7, "k/1", b"7")])

    assert again.offsets == [6, 7, 8]
    assert set(again.repeated) == {0, 1, 2}
    assert again.conflicts == {1: "k/6", 2: "k/0"}


def test_each_append_of_a_commit_gets_its_own_conflicts(log: SqliteLog) -> None:
    append(log, [row(1, 0), row(1, 1)])

    first, second, third = together(
        log, [row(2, 0), row(1, 0, payload=b"other")], [row(1, 1), row(2, 1)], [row(2, 0, "c/d")]
    )

    assert (set(first.repeated), first.conflicts) == ({1}, {1: "a/b"})
    assert (set(second.repeated), second.conflicts) == ({0}, {})
    assert (set(third.repeated), third.conflicts) == ({0}, {0: "a/b"})


def test_large_events_are_compared_in_parts(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "COMPARED_BYTES_MAX", 1000)
    append(log, [row(1, n, payload=bytes([n]) * 400) for n in range(10)])

    again = stored(log, [row(1, n, payload=bytes([n if n % 4 else 77]) * 400) for n in range(10)])

    assert set(again.conflicts) == {0, 4, 8}


def test_new_events_are_not_compared(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("nothing is repeated")

    monkeypatch.setattr(log._owner._identities, "_one_by_one", fail)

    assert append(log, [row(1, n) for n in range(5)] + [row(2, 3)]) == [1, 2, 3, 4, 5, 6]


# Removed events


@pytest.mark.parametrize("events", [100, 3 * BLOCK])
def test_removed_events_are_known_after_a_restart(path: str, events: int) -> None:
    with opened(path) as log:
        append(log, [row(1 + n % 3, n // 3) for n in range(events)])
        wait_until(lambda: sealed_blocks(path) >= events // BLOCK)
        log.prune(Rules(until=events))
    with opened(path) as log:
        again = stored(log, [row(2, 0), row(1, events // 3 - 1), row(3, 0), row(4, 0)])
        head = log.head()

    assert set(again.repeated) == {0, 1, 2}
    assert list(again.offsets) == [events, events, events, events + 1]
    assert head == events + 1
    assert ask(path, "SELECT count(*) FROM removed_identities") == 3


def test_the_events_of_one_publisher_are_one_range_however_often_retention_runs(path: str, log: SqliteLog) -> None:
    for first in range(0, 100, 10):
        append(log, [row(1, n) for n in range(first, first + 10)])
        log.prune(Rules(until=first + 7))

    assert ask(path, "SELECT json_group_array(json_array(first_sequence, last_sequence)) FROM removed_identities") == (
        "[[0,96]]"
    )


def test_a_removed_event_is_forgotten_after_its_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _: now)
    with opened(path, dedup_s=3600) as log:
        append(log, [row(1, n) for n in range(10)])
        log.prune(Rules(until=5))
        now += 3599 * 10**9
        log.prune(Rules(until=5))
        known = stored(log, [row(1, 0)])
        now += 2 * 10**9
        log.prune(Rules(until=5))
        forgotten = stored(log, [row(1, 0)])

    assert set(known.repeated) == {0}
    assert (set(forgotten.repeated), forgotten.offsets) == (set(), [11])
    assert ask(path, "SELECT count(*) FROM removed_identities") == 0


def test_without_dedup_nothing_is_remembered(path: str) -> None:
    with opened(path, dedup_s=0) as log:
        append(log, [row(1, n) for n in range(10)])
        log.prune(Rules(until=5))
        again = stored(log, [row(1, 0)])
        promise = log.promise.identities

    assert set(again.repeated) == set()
    assert ask(path, "SELECT count(*) FROM removed_identities") == 0
    assert promise == "as long as its event"


def test_the_log_says_how_long_identities_are_known(log: SqliteLog) -> None:
    assert log.promise.identities == "as long as its event, then 7 days"


def test_every_gap_of_a_publisher_is_kept_and_is_not_a_removed_event(path: str, log: SqliteLog) -> None:
    append(log, [row(1, 2 * number) for number in range(10_000)])
    log.prune(Rules(max_events=0))

    assert ask(path, "SELECT count(*) FROM removed_identities") == 10_000
    assert len(stored(log, [row(1, 2 * number) for number in range(10_000)]).repeated) == 10_000
    assert not stored(log, [row(1, 2 * number + 1) for number in range(10_000)]).repeated


def test_late_retries_after_the_purge_of_one_of_two_keys_store_nothing(path: str, log: SqliteLog) -> None:
    append(log, [row(1, number, f"customer/{number % 2}") for number in range(10_000)])
    log.purge(KeySet(["customer/1"]))

    again = stored(log, [row(1, number, "customer/1") for number in range(1, 10_000, 2)])

    assert len(again.repeated) == 5_000
    assert log.head() == 10_000


def test_ranges_of_one_publisher_are_joined_when_the_events_between_them_are_removed(path: str, log: SqliteLog) -> None:
    append(log, [row(1, number, f"customer/{number % 2}") for number in range(10_000)])
    log.purge(KeySet(["customer/1"]))
    fragments = ask(path, "SELECT count(*) FROM removed_identities")
    log.prune(Rules(until=10_000))

    assert fragments == 5_000
    assert ask(path, "SELECT json_group_array(json_array(first_sequence, last_sequence)) FROM removed_identities") == (
        "[[0,9999]]"
    )


def test_ranges_that_overlap_because_a_forgotten_event_was_stored_again_are_joined(path: str) -> None:
    with opened(path) as log:
        append(log, [row(1, number) for number in range(10)])
        log.prune(Rules(until=10))
    connection = raw(path)
    connection.execute("INSERT INTO removed_identities VALUES (1, 20, 29, 1), (1, 40, 49, 1), (2, 0, 9, 1)")
    connection.close()
    with opened(path) as log:
        append(log, [row(1, number) for number in (45, 12, *range(25, 33), 50)])
        log.prune(Rules(max_events=0))

    assert ask(
        path,
        "SELECT json_group_array(json_array(first_sequence, last_sequence)) FROM removed_identities WHERE publisher=1",
    ) == ("[[0,9],[12,12],[20,32],[40,50]]")


def test_identities_whose_time_is_over_are_deleted_in_parts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed_identities, "EXAMINED_MAX", 30)
    with opened(path, dedup_s=3600) as log:
        append(log, [row(publisher, 2 * number) for publisher in (1, 2) for number in range(50)])
        log.prune(Rules(max_events=0))
    now_ns, left = time.time_ns(), []
    engine = make_engine(path)
    with engine.connect() as connection:
        identities = RemovedIdentities(connection, 3600, lambda: now_ns)
        identities.forget_expired()  # examines some, whose time is not over
        now_ns += 3601 * 10**9
        for _ in range(4):
            identities.forget_expired()
            left.append(ask(path, "SELECT count(*) FROM removed_identities"))
    engine.dispose()

    assert left == [70, 40, 30, 0]


# Rows that cannot be encoded

BAD = [
    row(1 << 64, 0),
    row(1, 1 << 63),
    row(1, None),
    row(1, "0"),
    row(1, 1.5),
    row([], 0),  # type: ignore[arg-type]
    row(1, 0, key=None),
    row(1, 0, key=["a"]),
    row(1, 0, key="\ud800"),
    row(1, 0, payload="text"),
    row(1, 0, payload=None),
    row(1, 0, headers="text"),
]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_row_that_cannot_be_encoded_fails_its_own_append_and_no_other(path: str, log: SqliteLog, bad: Row) -> None:
    append(log, [row(99, 0)])

    before, failed, after = together(log, [row(5, 0), row(5, 1)], [row(6, 0), bad], [row(7, 0, "new/key")])

    assert isinstance(failed, Refused)
    assert failed.error.outcome == "refused"
    assert "cannot be encoded" in str(failed.error)
    assert [list(each.offsets) for each in (before, after)] == [[3, 4], [5]]
    assert ask(path, "SELECT count(*) FROM events WHERE publisher = 6") == 0
    assert append(log, [row(6, 0)]) == [6]
    assert append(log, [row(5, 1), row(5, 2)]) == [4, 7]


def test_an_append_of_one_row_that_cannot_be_encoded_leaves_the_writer_running(log: SqliteLog) -> None:
    for bad in BAD:
        with pytest.raises(LogError, match="cannot be encoded"):
            append(log, [bad])

    assert append(log, [row(1, 0)]) == [1]
