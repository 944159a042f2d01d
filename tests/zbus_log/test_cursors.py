"""Durable cursors: one reader for each name, positions that only go forward, and survive any end."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pysqlite3
import pytest
from log_support import wait_until

from zbus import BusConfig
from zbus.errors import CursorError, LogError
from zbus_log import SqliteLog, open_log

HOLDER = """
import sys
from zbus import BusConfig
from zbus_log import open_log
log = open_log(BusConfig(log=sys.argv[1], read_only=True))
print(log.cursors.claim("worker", ["a/**"], 3), flush=True)
log.cursors.advance("worker", 5, lambda error: print(error, flush=True))
sys.stdin.read()
"""


def advance(log: SqliteLog, name: str, offset: int) -> None:
    """Advance and wait until it is on disk."""
    answers: SimpleQueue[LogError | None] = SimpleQueue()
    log.cursors.advance(name, offset, answers.put)
    error = answers.get(timeout=20)
    if error is not None:
        raise error


def positions(log: SqliteLog) -> dict[str, int]:
    return {cursor.name: cursor.offset for cursor in log.cursors.list()}


def stored(path: Path, name: str) -> int:
    """The position on disk, seen by a connection that knows nothing of ours."""
    connection = pysqlite3.connect(f"{path}-cursors", isolation_level=None)
    try:
        return int(connection.execute("SELECT offset FROM cursors WHERE name = ?", (name,)).fetchone()[0])
    finally:
        connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def log(path: Path) -> Iterator[SqliteLog]:
    opened = open_log(BusConfig(log=str(path)))
    yield opened
    opened.close(5.0)


@pytest.fixture
def holder(path: Path, log: SqliteLog) -> Iterator[subprocess.Popen[str]]:
    """Another process that reads with the name 'worker' and has acknowledged up to 5."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "3\n"
    assert process.stdout.readline() == "None\n"
    yield process
    process.kill()
    process.communicate()


# Claiming


def test_a_new_name_starts_where_it_is_told_and_a_known_one_where_it_stopped(log: SqliteLog) -> None:
    assert log.cursors.claim("worker", ["a/**"], 7) == 7
    advance(log, "worker", 20)
    log.cursors.release("worker")

    assert log.cursors.claim("worker", ["a/**"], 0) == 20


def test_a_position_survives_a_restart(path: Path) -> None:
    log = open_log(BusConfig(log=str(path)))
    log.cursors.claim("worker", ["**"], 0)
    advance(log, "worker", 42)
    log.cursors.release("worker")
    log.close(5.0)

    log = open_log(BusConfig(log=str(path)))
    assert log.cursors.claim("worker", ["**"], 0) == 42
    log.close(5.0)


def test_close_stores_what_was_advanced_before_it(path: Path) -> None:
    log = open_log(BusConfig(log=str(path)))
    log.cursors.claim("worker", ["**"], 0)
    blocker = pysqlite3.connect(f"{path}-cursors", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    log.cursors.advance("worker", 5)
    wait_until(lambda: not log.cursors._pending)  # the cursors' thread has taken it, and waits
    log.cursors.advance("worker", 6)
    closing = threading.Thread(target=log.close, args=(10.0,))
    closing.start()
    wait_until(lambda: log.cursors._ended)
    blocker.execute("COMMIT")
    blocker.close()
    closing.join(20)

    assert stored(path, "worker") == 6


def test_a_name_is_used_by_one_reader_at_a_time(log: SqliteLog) -> None:
    log.cursors.claim("worker", ["**"], 0)

    with pytest.raises(CursorError, match=str(os.getpid())) as caught:
        log.cursors.claim("worker", ["**"], 0)

    assert caught.value.name == "worker"
    assert log.cursors.claim("another", ["**"], 0) == 0


def test_two_readers_that_claim_at_once_do_not_both_get_the_name(path: Path, log: SqliteLog) -> None:
    other = open_log(BusConfig(log=str(path), read_only=True))
    outcomes: SimpleQueue[str] = SimpleQueue()
    start = threading.Barrier(4)

    def claim(who: SqliteLog) -> None:
        start.wait(20)
        try:
            who.cursors.claim("worker", ["**"], 0)
            outcomes.put("claimed")
        except CursorError:
            outcomes.put("refused")

    threads = [threading.Thread(target=claim, args=(who,)) for who in (log, other, log, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    other.close(5.0)

    assert sorted(outcomes.get_nowait() for _ in range(4)) == ["claimed", "refused", "refused", "refused"]


def test_a_name_that_a_live_process_uses_is_refused_with_its_pid(log: SqliteLog, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(CursorError) as caught:
        log.cursors.claim("worker", ["**"], 0)

    assert str(holder.pid) in caught.value.reason
    assert [(c.name, c.owner_pid) for c in log.cursors.list()] == [("worker", holder.pid)]


def test_the_name_of_a_killed_process_can_be_claimed_at_once(log: SqliteLog, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(20)

    assert log.cursors.list()[0].owner_pid is None
    assert log.cursors.claim("worker", ["**"], 0) == 5


def test_the_name_of_a_killed_process_can_be_claimed_before_its_parent_looked(
    log: SqliteLog, holder: subprocess.Popen[str]
) -> None:
    os.kill(holder.pid, signal.SIGKILL)  # a zombie from here on, until somebody waits for it
    status = Path(f"/proc/{holder.pid}/stat")
    wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "Z")

    assert log.cursors.claim("worker", ["**"], 0) == 5


def test_a_pid_that_is_used_again_by_another_process_does_not_hold_the_name(path: Path, log: SqliteLog) -> None:
    log.cursors.claim("worker", ["**"], 4)
    connection = pysqlite3.connect(f"{path}-cursors", isolation_level=None)
    connection.execute("UPDATE cursors SET owner_started = owner_started - 1")  # an earlier process, our pid
    connection.close()

    assert log.cursors.list()[0].owner_pid is None
    assert log.cursors.claim("worker", ["**"], 0) == 4


def test_claiming_leaves_the_position_and_notes_the_new_expressions(log: SqliteLog) -> None:
    log.cursors.claim("worker", ["a/**", "b/*"], 9)
    log.cursors.release("worker")
    log.cursors.claim("worker", ["c/**"], 1)

    (cursor,) = log.cursors.list()
    assert (cursor.name, cursor.offset, cursor.keys, cursor.owner_pid) == ("worker", 9, ("c/**",), os.getpid())


@pytest.mark.parametrize("name", ["", "x" * 201, "line\nbreak", "nul\x00", "half \ud800", 5, None])
def test_a_name_that_nobody_could_type_is_refused(log: SqliteLog, name: Any) -> None:
    with pytest.raises(CursorError):
        log.cursors.claim(name, ["**"], 0)

    assert log.cursors.list() == []


@pytest.mark.parametrize("name", ["worker", "x" * 200, "größe 1", "it's; DROP TABLE cursors", "a/b:c"])
def test_a_printable_name_is_taken_as_it_is(log: SqliteLog, name: str) -> None:
    log.cursors.claim(name, ["**"], 0)
    advance(log, name, 3)

    assert positions(log) == {name: 3}


# Advancing


def test_a_position_never_goes_backwards(log: SqliteLog) -> None:
    log.cursors.claim("worker", ["**"], 10)
    for offset in (12, 11, 30, 5, 29):
        advance(log, "worker", offset)
        log.cursors.advance("worker", offset - 5)

    log.cursors.release("worker")
    assert positions(log) == {"worker": 30}


def test_an_acknowledged_position_is_on_disk_when_done_is_called(path: Path, log: SqliteLog) -> None:
    log.cursors.claim("worker", ["**"], 0)
    seen: SimpleQueue[tuple[LogError | None, int]] = SimpleQueue()

    for offset in range(1, 21):
        log.cursors.advance("worker", offset, lambda error: seen.put((error, stored(path, "worker"))))
        assert seen.get(timeout=20) == (None, offset)


def test_every_done_is_called_once(log: SqliteLog) -> None:
    for name in ("first", "second"):
        log.cursors.claim(name, ["**"], 0)
    calls: SimpleQueue[LogError | None] = SimpleQueue()

    for offset in range(1, 501):
        log.cursors.advance("first", offset, calls.put)
        log.cursors.advance("second", 501 - offset, calls.put)
    outcomes = [calls.get(timeout=20) for _ in range(1000)]
    log.cursors.release("first")

    assert set(outcomes) == {None}
    assert calls.empty()
    assert positions(log) == {"first": 500, "second": 500}


def test_many_advances_share_few_transactions(path: Path, log: SqliteLog) -> None:
    log.cursors.claim("worker", ["**"], 0)
    keeper = pysqlite3.connect(f"{path}-cursors")  # while it is open, the write-ahead log is not removed
    keeper.execute("SELECT * FROM cursors").fetchall()

    for offset in range(1, 20_000):
        log.cursors.advance("worker", offset)
    advance(log, "worker", 20_000)

    data = Path(f"{path}-cursors-wal").read_bytes()
    page = struct.unpack_from(">I", data, 8)[0]
    commits = sum(1 for at in range(32, len(data) - page, page + 24) if struct.unpack_from(">I", data, at + 4)[0])
    keeper.close()
    assert positions(log) == {"worker": 20_000}
    assert 1 <= commits < 1000


def test_an_advance_after_close_says_that_it_was_not_stored(path: Path, log: SqliteLog) -> None:
    log.cursors.claim("worker", ["**"], 0)
    log.close(5.0)

    with pytest.raises(LogError, match="closed"):
        advance(log, "worker", 5)
    assert stored(path, "worker") == 0


def test_an_advance_of_a_name_that_was_never_claimed_here_is_answered(log: SqliteLog) -> None:
    answers: SimpleQueue[LogError | None] = SimpleQueue()

    log.cursors.advance("nobody", 5, answers.put)

    answers.get(timeout=5)
    assert positions(log) == {}


def test_a_position_that_cannot_be_stored_is_reported_and_stored_later(path: Path, log: SqliteLog) -> None:
    log.cursors.claim("worker", ["**"], 0)
    connection = pysqlite3.connect(f"{path}-cursors", isolation_level=None)
    connection.execute("ALTER TABLE cursors RENAME TO elsewhere")

    with pytest.raises(LogError):
        advance(log, "worker", 5)

    connection.execute("ALTER TABLE elsewhere RENAME TO cursors")
    connection.close()
    wait_until(lambda: stored(path, "worker") == 5)


def test_a_position_that_cannot_be_stored_is_not_tried_without_a_pause(path: Path, log: SqliteLog) -> None:
    log.cursors.claim("worker", ["**"], 0)
    connection = pysqlite3.connect(f"{path}-cursors", isolation_level=None)
    connection.execute("ALTER TABLE cursors RENAME TO elsewhere")
    before = time.process_time()

    with pytest.raises(LogError):
        advance(log, "worker", 5)
    time.sleep(0.5)  # what is measured: how busy the process is while nothing can be stored

    assert time.process_time() - before < 0.4
    connection.execute("ALTER TABLE elsewhere RENAME TO cursors")
    connection.close()


# Releasing


def test_a_released_name_is_at_its_last_position_already(path: Path, log: SqliteLog) -> None:
    for offset in range(1, 31):
        log.cursors.claim("worker", ["**"], 0)
        log.cursors.advance("worker", offset)
        log.cursors.release("worker")
        assert stored(path, "worker") == offset


def test_a_release_waits_for_a_position_that_is_being_stored(path: Path, log: SqliteLog) -> None:
    log.cursors.claim("worker", ["**"], 0)
    blocker = pysqlite3.connect(f"{path}-cursors", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # another process is storing a position of its own
    log.cursors.advance("worker", 5)
    wait_until(lambda: not log.cursors._pending)  # the cursors' thread has taken it, and waits
    time.sleep(0.4)  # SQLite asks less and less often: whoever comes later is served earlier
    released: SimpleQueue[int] = SimpleQueue()

    def release() -> None:
        log.cursors.release("worker")
        released.put(stored(path, "worker"))

    thread = threading.Thread(target=release)
    thread.start()
    time.sleep(0.03)
    blocker.execute("COMMIT")
    blocker.close()
    thread.join(20)

    assert released.get(timeout=20) == 5


def test_releasing_a_name_that_another_process_uses_changes_nothing(
    log: SqliteLog, holder: subprocess.Popen[str]
) -> None:
    log.cursors.release("worker")

    assert log.cursors.list()[0].owner_pid == holder.pid


# What the command line does


def test_cursors_are_listed_by_name(log: SqliteLog) -> None:
    assert log.cursors.list() == []
    before = time.time_ns()
    for name, start in (("b", 2), ("a", 1), ("c", 3)):
        log.cursors.claim(name, [f"{name}/**"], start)
    log.cursors.release("b")

    found = log.cursors.list()

    assert [(c.name, c.offset, c.keys, c.owner_pid) for c in found] == [
        ("a", 1, ("a/**",), os.getpid()),
        ("b", 2, ("b/**",), None),
        ("c", 3, ("c/**",), os.getpid()),
    ]
    assert all(before <= cursor.updated_at_ns <= time.time_ns() for cursor in found)


def test_listing_a_log_that_never_had_a_cursor_makes_no_file(path: Path, log: SqliteLog) -> None:
    assert log.cursors.list() == []
    assert not Path(f"{path}-cursors").exists()


@pytest.mark.parametrize("position", [2, 900])
def test_a_reset_moves_a_name_in_either_direction(log: SqliteLog, position: int) -> None:
    log.cursors.claim("worker", ["**"], 50)
    log.cursors.release("worker")

    log.cursors.reset("worker", position)

    assert log.cursors.claim("worker", ["**"], 0) == position


def test_a_deleted_name_starts_anew(log: SqliteLog) -> None:
    for name in ("worker", "other"):
        log.cursors.claim(name, ["**"], 50)
        log.cursors.release(name)

    log.cursors.delete("worker")

    assert positions(log) == {"other": 50}
    assert log.cursors.claim("worker", ["**"], 8) == 8


def test_a_name_in_use_is_neither_reset_nor_deleted(log: SqliteLog, holder: subprocess.Popen[str]) -> None:
    for change in (lambda: log.cursors.reset("worker", 0), lambda: log.cursors.delete("worker")):
        with pytest.raises(CursorError, match=str(holder.pid)):
            change()

    assert positions(log) == {"worker": 5}


def test_an_unknown_name_is_neither_reset_nor_deleted(log: SqliteLog) -> None:
    for change in (lambda: log.cursors.reset("nobody", 0), lambda: log.cursors.delete("nobody")):
        with pytest.raises(CursorError, match="no such cursor"):
            change()
