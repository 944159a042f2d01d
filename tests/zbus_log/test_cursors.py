"""Durable cursors: one reader for each name, positions that only go forward, and survive any end."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from log_support import append, wait_until
from mesh_fakes import recorded

from zbus import BusConfig
from zbus.errors import CursorError, LogError, ZbusError
from zbus.ports.log import Row
from zbus_log import SqliteLog, open_log
from zbus_log.file import sqlite_driver

DATA = Path(__file__).parents[1] / "data" / "v1"
HOLDER = """
import sys
from zbus import BusConfig
from zbus_log import open_log
log = open_log(BusConfig(log=sys.argv[1], read_only=True))
lease = log.cursors.claim("worker", ["a/**"], 3)
print(lease.offset, flush=True)
log.cursors.advance("worker", lease.token, 5, lambda error: print(error, flush=True))
sys.stdin.read()
"""


def claim(log: SqliteLog, name: str, start: int = 0) -> str:
    """Take the lease of a name and return its token."""
    return log.cursors.claim(name, ["**"], start).token


def advance(log: SqliteLog, name: str, token: str, offset: int) -> None:
    """Advance and wait until it is on disk."""
    answers: SimpleQueue[ZbusError | None] = SimpleQueue()
    log.cursors.advance(name, token, offset, answers.put)
    error = answers.get(timeout=20)
    if error is not None:
        raise error


def positions(log: SqliteLog) -> dict[str, int]:
    return {cursor.name: cursor.offset for cursor in log.cursors.list()}


def stored(path: Path, name: str) -> int:
    """The position on disk, seen by a connection that knows nothing of ours."""
    connection = sqlite_driver.connect(f"{path}-cursors")
    try:
        return int(connection.execute("SELECT offset FROM cursors WHERE name = ?", (name,)).fetchone()[0])
    finally:
        connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log with 1,000 events."""
    path = tmp_path / "app.db"
    log = open_log(BusConfig(log=str(path)))
    append(log, [Row(1, n, n, "a/b", b"x") for n in range(1000)])
    log.close(5.0)
    return path


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


def test_a_new_name_starts_at_start_and_a_known_one_where_it_stopped(log: SqliteLog) -> None:
    token, offset, _ = log.cursors.claim("worker", ["a/**"], 7)
    advance(log, "worker", token, 20)
    log.cursors.release("worker", token)

    assert offset == 7
    assert log.cursors.claim("worker", ["a/**"], 0).offset == 20


def test_each_claim_has_a_token_of_its_own(log: SqliteLog) -> None:
    tokens = []
    for _ in range(3):
        tokens.append(claim(log, "worker"))
        log.cursors.release("worker", tokens[-1])

    assert len({*tokens, claim(log, "another")}) == 4


def test_a_position_survives_a_restart(path: Path) -> None:
    log = open_log(BusConfig(log=str(path)))
    token = claim(log, "worker")
    advance(log, "worker", token, 42)
    log.cursors.release("worker", token)
    log.close(5.0)

    log = open_log(BusConfig(log=str(path)))
    assert log.cursors.claim("worker", ["**"], 0).offset == 42
    log.close(5.0)


def test_close_stores_what_was_advanced_before_it(path: Path) -> None:
    log = open_log(BusConfig(log=str(path)))
    token = claim(log, "worker")
    blocker = sqlite_driver.connect(f"{path}-cursors")
    blocker.execute("BEGIN IMMEDIATE")
    log.cursors.advance("worker", token, 5)
    wait_until(lambda: not log.cursors._pending)  # the cursors' thread has taken it, and waits
    log.cursors.advance("worker", token, 6)
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
    assert log.cursors.claim("another", ["**"], 0).offset == 0


def test_two_readers_that_claim_at_once_do_not_both_get_the_name(path: Path, log: SqliteLog) -> None:
    other = open_log(BusConfig(log=str(path), read_only=True))
    outcomes: SimpleQueue[str] = SimpleQueue()
    start = threading.Barrier(4)

    def race(who: SqliteLog) -> None:
        start.wait(20)
        try:
            who.cursors.claim("worker", ["**"], 0)
            outcomes.put("claimed")
        except CursorError:
            outcomes.put("refused")

    threads = [threading.Thread(target=race, args=(who,)) for who in (log, other, log, other)]
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
    assert [(c.name, c.owner) for c in log.cursors.list()] == [("worker", f"process {holder.pid}")]


def test_the_name_of_a_killed_process_can_be_claimed_at_once(log: SqliteLog, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(20)

    assert log.cursors.list()[0].owner is None
    assert log.cursors.claim("worker", ["**"], 0).offset == 5


def test_the_name_of_a_killed_process_can_be_claimed_before_its_parent_looked(
    log: SqliteLog, holder: subprocess.Popen[str]
) -> None:
    os.kill(holder.pid, signal.SIGKILL)  # a zombie from here on, until its parent waits for it
    status, threads = Path(f"/proc/{holder.pid}/stat"), Path(f"/proc/{holder.pid}/task")
    wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "Z")
    wait_until(lambda: len(list(threads.iterdir())) == 1)  # its other threads hold the lock until they have ended

    assert log.cursors.claim("worker", ["**"], 0).offset == 5


def test_a_lease_does_not_depend_on_a_process_id(path: Path, log: SqliteLog, holder: subprocess.Popen[str]) -> None:
    """A process in another container has an id that means nothing here, or that another process has here."""
    connection = sqlite_driver.connect(f"{path}-cursors")
    for pid in (0x7FFFFFFF, os.getpid()):
        connection.execute("UPDATE cursors SET owner_pid = ?", (pid,))
        with pytest.raises(CursorError, match=f"process {pid} holds its lease"):
            log.cursors.claim("worker", ["**"], 0)
        assert log.cursors.list()[0].owner == f"process {pid}"
    connection.close()
    holder.kill()
    holder.wait(20)

    assert log.cursors.list()[0].owner is None
    assert log.cursors.claim("worker", ["**"], 0).offset == 5


FORKS = """
import os, sys
from zbus import BusConfig
from zbus_log import open_log
log = open_log(BusConfig(log=sys.argv[1], read_only=True))
log.cursors.claim("worker", ["a/**"], 3)
if os.fork():
    print("forked", flush=True)
    os._exit(0)
sys.stdin.read()
os._exit(0)
"""


def test_a_forked_process_does_not_keep_the_leases_of_its_parent(path: Path, log: SqliteLog) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "forked\n"
    parent.wait(20)  # its child goes on until stdin ends

    assert log.cursors.claim("worker", ["**"], 0).offset == 3
    parent.communicate(timeout=20)


def test_closing_a_log_ends_its_leases(path: Path, log: SqliteLog) -> None:
    other = open_log(BusConfig(log=str(path), read_only=True))
    claim(other, "worker", 4)
    with pytest.raises(CursorError):
        claim(log, "worker")

    other.close(5.0)

    assert log.cursors.claim("worker", ["**"], 0).offset == 4


def test_a_claim_that_fails_leaves_no_lease(path: Path, log: SqliteLog) -> None:
    log.cursors.release("worker", claim(log, "worker", 4))
    connection = sqlite_driver.connect(f"{path}-cursors")
    connection.execute("CREATE TRIGGER full BEFORE UPDATE ON cursors BEGIN SELECT RAISE(ABORT, 'full'); END")

    with pytest.raises(LogError, match="full"):
        claim(log, "worker")
    connection.execute("DROP TRIGGER full")
    connection.close()

    assert log.cursors.claim("worker", ["**"], 0).offset == 4


def test_a_folder_of_leases_that_cannot_be_used_is_an_error_that_says_so(path: Path, log: SqliteLog) -> None:
    Path(f"{path}-leases").write_bytes(b"")

    with pytest.raises(LogError, match=r"-leases: the lease of 'worker' is unknown: .*This call changed nothing"):
        claim(log, "worker")
    assert log.cursors.list() == []


def test_claiming_leaves_the_position_and_notes_the_new_expressions(log: SqliteLog) -> None:
    log.cursors.release("worker", log.cursors.claim("worker", ["a/**", "b/*"], 9).token)
    log.cursors.claim("worker", ["c/**"], 1)

    (cursor,) = log.cursors.list()
    assert (cursor.name, cursor.offset, cursor.keys, cursor.owner) == ("worker", 9, ("c/**",), f"process {os.getpid()}")


@pytest.mark.parametrize("name", ["", "x" * 201, "line\nbreak", "nul\x00", "half \ud800", 5, None])
def test_a_name_that_cannot_be_typed_is_refused(log: SqliteLog, name: Any) -> None:
    with pytest.raises(CursorError):
        log.cursors.claim(name, ["**"], 0)

    assert log.cursors.list() == []


@pytest.mark.parametrize("name", ["worker", "x" * 200, "größe 1", "it's; DROP TABLE cursors", "a/b:c"])
def test_a_printable_name_is_taken_as_it_is(log: SqliteLog, name: str) -> None:
    advance(log, name, claim(log, name), 3)

    assert positions(log) == {name: 3}


# Advancing


def test_a_position_never_goes_backwards(log: SqliteLog) -> None:
    token = claim(log, "worker", 10)
    for offset in (12, 11, 30, 5, 29):
        advance(log, "worker", token, offset)
        log.cursors.advance("worker", token, offset - 5)

    log.cursors.release("worker", token)
    assert positions(log) == {"worker": 30}


def test_an_acknowledged_position_is_on_disk_when_done_is_called(path: Path, log: SqliteLog) -> None:
    token = claim(log, "worker")
    seen: SimpleQueue[tuple[ZbusError | None, int]] = SimpleQueue()

    for offset in range(1, 21):
        log.cursors.advance("worker", token, offset, lambda error: seen.put((error, stored(path, "worker"))))
        assert seen.get(timeout=20) == (None, offset)


def test_every_done_is_called_once(log: SqliteLog) -> None:
    first, second = claim(log, "first"), claim(log, "second")
    calls: SimpleQueue[ZbusError | None] = SimpleQueue()

    for offset in range(1, 501):
        log.cursors.advance("first", first, offset, calls.put)
        log.cursors.advance("second", second, 501 - offset, calls.put)
    outcomes = [calls.get(timeout=20) for _ in range(1000)]
    log.cursors.release("first", first)

    assert set(outcomes) == {None}
    assert calls.empty()
    assert positions(log) == {"first": 500, "second": 500}


def test_many_advances_share_few_transactions(path: Path, log: SqliteLog) -> None:
    token = claim(log, "worker")
    keeper = sqlite_driver.connect(f"{path}-cursors")  # while it is open, the write-ahead log is not removed
    keeper.execute("SELECT * FROM cursors").fetchall()

    for offset in range(1, 20_000):
        log.cursors.advance("worker", token, offset)
    advance(log, "worker", token, 20_000)

    data = Path(f"{path}-cursors-wal").read_bytes()
    page = struct.unpack_from(">I", data, 8)[0]
    commits = sum(1 for at in range(32, len(data) - page, page + 24) if struct.unpack_from(">I", data, at + 4)[0])
    keeper.close()
    assert positions(log) == {"worker": 20_000}
    assert 1 <= commits < 1000


def test_an_advance_after_close_says_that_it_was_not_stored(path: Path, log: SqliteLog) -> None:
    token = claim(log, "worker")
    log.close(5.0)

    with pytest.raises(LogError, match="closed"):
        advance(log, "worker", token, 5)
    assert stored(path, "worker") == 0


def test_an_advance_of_a_name_that_was_never_claimed_is_refused(log: SqliteLog) -> None:
    token = claim(log, "worker")

    with pytest.raises(CursorError, match="lease") as caught:
        advance(log, "nobody", token, 5)

    assert caught.value.name == "nobody"
    assert positions(log) == {"worker": 0}


def test_a_late_acknowledgement_with_an_old_token_is_refused_stores_nothing_and_is_recorded(
    path: Path, log: SqliteLog
) -> None:
    old = claim(log, "worker", 4)
    shutil.rmtree(f"{path}-leases")  # the holder knows nothing of that
    new = claim(log, "worker")
    advance(log, "worker", new, 6)

    with recorded() as records, pytest.raises(CursorError, match="lease") as caught:
        advance(log, "worker", old, 9)
    log.cursors.advance("worker", old, 10)  # no caller waits for this one
    log.cursors.release("worker", old)

    assert (caught.value.name, positions(log)) == ("worker", {"worker": 6})
    assert [(r["level"], r["durable"], r["code"]) for r in records if r["record"] == "LEASE_LOST"] == [
        (logging.WARNING, "worker", "lease_lost")
    ]
    advance(log, "worker", new, 7)  # and the new holder is not disturbed
    assert positions(log) == {"worker": 7}


def test_an_acknowledgement_after_the_release_is_refused(log: SqliteLog) -> None:
    token = claim(log, "worker", 4)
    log.cursors.release("worker", token)

    with recorded() as records, pytest.raises(CursorError, match="lease"):
        advance(log, "worker", token, 9)

    assert positions(log) == {"worker": 4}
    assert [r["durable"] for r in records if r["record"] == "LEASE_LOST"] == ["worker"]


def test_of_two_positions_in_one_store_only_the_one_whose_lease_is_held_is_kept(path: Path, log: SqliteLog) -> None:
    old = claim(log, "worker")
    shutil.rmtree(f"{path}-leases")  # the holder knows nothing of that
    new = claim(log, "worker")
    answers: SimpleQueue[tuple[str, ZbusError | None]] = SimpleQueue()
    with log.cursors._flushing:  # both are taken by one store
        log.cursors.advance("worker", old, 9, lambda error: answers.put(("old", error)))
        log.cursors.advance("worker", new, 3, lambda error: answers.put(("new", error)))
    found = dict(answers.get(timeout=20) for _ in range(2))

    assert isinstance(found["old"], CursorError)
    assert found["new"] is None
    assert positions(log) == {"worker": 3}


def test_a_position_that_cannot_be_stored_is_reported_and_stored_later(path: Path, log: SqliteLog) -> None:
    token = claim(log, "worker")
    connection = sqlite_driver.connect(f"{path}-cursors")
    connection.execute("ALTER TABLE cursors RENAME TO elsewhere")

    with pytest.raises(LogError):
        advance(log, "worker", token, 5)

    connection.execute("ALTER TABLE elsewhere RENAME TO cursors")
    connection.close()
    wait_until(lambda: stored(path, "worker") == 5)


def test_a_position_that_cannot_be_stored_is_not_tried_without_a_pause(path: Path, log: SqliteLog) -> None:
    token = claim(log, "worker")
    connection = sqlite_driver.connect(f"{path}-cursors")
    connection.execute("ALTER TABLE cursors RENAME TO elsewhere")
    before = time.process_time()

    with pytest.raises(LogError):
        advance(log, "worker", token, 5)
    time.sleep(0.5)  # what is measured: how busy the process is while nothing can be stored

    assert time.process_time() - before < 0.4
    connection.execute("ALTER TABLE elsewhere RENAME TO cursors")
    connection.close()


# Releasing


def test_a_released_name_is_at_its_last_position_already(path: Path, log: SqliteLog) -> None:
    for offset in range(1, 31):
        token = claim(log, "worker")
        log.cursors.advance("worker", token, offset)
        log.cursors.release("worker", token)
        assert stored(path, "worker") == offset


def test_a_release_waits_for_a_position_that_is_being_stored(path: Path, log: SqliteLog) -> None:
    token = claim(log, "worker")
    blocker = sqlite_driver.connect(f"{path}-cursors")
    blocker.execute("BEGIN IMMEDIATE")  # another process is storing a position of its own
    log.cursors.advance("worker", token, 5)
    wait_until(lambda: not log.cursors._pending)  # the cursors' thread has taken it, and waits
    time.sleep(0.4)  # SQLite polls the lock less and less often, so a later caller may get it earlier
    released: SimpleQueue[int] = SimpleQueue()

    def release() -> None:
        log.cursors.release("worker", token)
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
    log.cursors.release("worker", "not its token")

    assert log.cursors.list()[0].owner == f"process {holder.pid}"


# The command line


def test_cursors_are_listed_by_name(log: SqliteLog) -> None:
    assert log.cursors.list() == []
    before = time.time_ns()
    leases = {name: log.cursors.claim(name, [f"{name}/**"], start) for name, start in (("b", 2), ("a", 1), ("c", 3))}
    log.cursors.release("b", leases["b"].token)

    found = log.cursors.list()

    assert [(c.name, c.offset, c.keys, c.owner) for c in found] == [
        ("a", 1, ("a/**",), f"process {os.getpid()}"),
        ("b", 2, ("b/**",), None),
        ("c", 3, ("c/**",), f"process {os.getpid()}"),
    ]
    assert all(before <= cursor.updated_at_ns <= time.time_ns() for cursor in found)


def test_listing_a_log_that_never_had_a_cursor_makes_no_file(path: Path, log: SqliteLog) -> None:
    assert log.cursors.list() == []
    assert not Path(f"{path}-cursors").exists()


@pytest.mark.parametrize("position", [2, 900])
def test_a_reset_moves_a_name_in_either_direction(log: SqliteLog, position: int) -> None:
    log.cursors.release("worker", claim(log, "worker", 50))

    log.cursors.reset("worker", position)

    assert log.cursors.claim("worker", ["**"], 0).offset == position


def test_a_deleted_name_starts_anew(log: SqliteLog) -> None:
    for name in ("worker", "other"):
        log.cursors.release(name, claim(log, name, 50))

    log.cursors.delete("worker")

    assert positions(log) == {"other": 50}
    assert len(list(Path(f"{log.path}-leases").iterdir())) == 1
    assert log.cursors.claim("worker", ["**"], 8).offset == 8


def test_a_name_in_use_is_neither_reset_nor_deleted(log: SqliteLog, holder: subprocess.Popen[str]) -> None:
    for change in (lambda: log.cursors.reset("worker", 0), lambda: log.cursors.delete("worker")):
        with pytest.raises(CursorError, match=str(holder.pid)):
            change()

    assert positions(log) == {"worker": 5}


def test_an_unknown_name_is_neither_reset_nor_deleted(log: SqliteLog) -> None:
    for change in (lambda: log.cursors.reset("nobody", 0), lambda: log.cursors.delete("nobody")):
        with pytest.raises(CursorError, match="no such cursor"):
            change()


# The first version


def columns(path: Path) -> list[str]:
    connection = sqlite_driver.connect(f"{path}-cursors")
    found = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info('cursors')")]
    connection.close()
    return found


def test_a_cursors_file_of_the_first_version_gets_leases_and_keeps_its_positions(path: Path) -> None:
    for suffix in ("", "-head", "-cursors"):
        shutil.copyfile(DATA / f"log.db{suffix}", f"{path}{suffix}")
    assert "token" not in columns(path)
    log = open_log(BusConfig(log=str(path)))
    try:
        before = {cursor.name: (cursor.offset, cursor.owner) for cursor in log.cursors.list()}
        name, (offset, _) = next(iter(before.items()))
        lease = log.cursors.claim(name, ["**"], 0)
        advance(log, name, lease.token, offset + 1)
        log.cursors.release(name, lease.token)
        after = positions(log)
    finally:
        log.close(5.0)

    assert before
    assert {owner for _, owner in before.values()} == {None}
    assert lease.offset == offset
    assert after == {each: at for each, (at, _) in before.items()} | {name: offset + 1}
    assert columns(path)[-3:] == ["token", "incarnation", "checksum"]


# A file that is removed or replaced


def remove(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}-cursors*"):
        each.unlink()


def test_positions_are_stored_again_if_their_file_was_removed(path: Path, log: SqliteLog) -> None:
    active, idle = claim(log, "active", 3), claim(log, "idle", 5)
    advance(log, "active", active, 7)
    advance(log, "idle", idle, 6)
    remove(path)

    with recorded() as records:
        advance(log, "active", active, 8)

    assert (stored(path, "active"), stored(path, "idle")) == (8, 6)
    assert [(each["record"], each["level"], each["path"], each["code"], each["durables"]) for each in records] == [
        ("LOG_CURSORS_LOST", logging.ERROR, f"{path}-cursors", "cursors_removed", ["active", "idle"])
    ]
    with pytest.raises(CursorError, match=f"process {os.getpid()} holds its lease"):
        claim(log, "idle")
    log.cursors.release("active", active)
    assert log.cursors.claim("active", ["**"], 0).offset == 8


def test_a_name_that_is_released_after_its_file_was_removed_keeps_its_position(path: Path, log: SqliteLog) -> None:
    token = claim(log, "worker", 3)
    remove(path)

    log.cursors.release("worker", token)

    assert log.cursors.claim("worker", ["**"], 100).offset == 3


def test_retention_still_stops_at_a_cursor_whose_file_was_removed(path: Path, log: SqliteLog) -> None:
    claim(log, "worker", 3)
    remove(path)

    lowest = log.cursors.lowest()

    assert lowest is not None
    assert (lowest.name, lowest.offset) == ("worker", 3)


def test_a_file_that_was_replaced_gets_the_positions_of_this_process(path: Path, log: SqliteLog) -> None:
    other = claim(log, "other", 2)
    log.cursors.release("other", other)
    token = claim(log, "worker", 3)
    copy = path.parent / "copy"
    with closing(sqlite_driver.connect(f"{path}-cursors")) as connection:
        connection.execute("VACUUM INTO ?", (str(copy),))
    advance(log, "worker", token, 7)
    remove(path)
    copy.rename(f"{path}-cursors")

    advance(log, "worker", token, 8)

    assert (stored(path, "worker"), stored(path, "other")) == (8, 2)


def test_a_subscriber_whose_files_were_removed_does_not_take_the_name_from_another_one(
    path: Path, log: SqliteLog
) -> None:
    token = claim(log, "worker", 3)
    remove(path)
    shutil.rmtree(f"{path}-leases")
    other = open_log(BusConfig(log=str(path), read_only=True))
    theirs = claim(other, "worker", 10)

    with recorded() as records, pytest.raises(CursorError, match="another subscriber has its lease"):
        advance(log, "worker", token, 50)

    assert stored(path, "worker") == 10
    assert [each["record"] for each in records] == ["LOG_CURSORS_LOST", "LEASE_LOST"]
    advance(other, "worker", theirs, 11)
    other.close(5.0)


def test_positions_that_cannot_be_stored_again_yet_are_stored_later(path: Path, log: SqliteLog) -> None:
    token = claim(log, "worker", 3)
    remove(path)
    Path(f"{path}-cursors").mkdir()

    with pytest.raises(LogError, match="could not open it"):
        advance(log, "worker", token, 7)
    Path(f"{path}-cursors").rmdir()

    advance(log, "worker", token, 8)
    assert stored(path, "worker") == 8


# Locks


def test_a_claim_that_waits_for_a_lock_does_not_keep_others_from_storing_positions(
    path: Path, log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(log, "worker")
    waits = 0

    def wait(_: float) -> None:
        nonlocal waits
        waits += 1
        with closing(sqlite_driver.connect(f"{path}-cursors", timeout_s=0)) as connection:
            connection.execute("BEGIN IMMEDIATE")

    monkeypatch.setattr("zbus_log.file.name_locks.sleep", wait)
    for attempt in (lambda: claim(log, "worker"), lambda: log.cursors.delete("worker")):
        with pytest.raises(CursorError, match=f"process {os.getpid()}"):
            attempt()

    assert waits == 10


def test_a_release_that_cannot_be_stored_still_ends_the_lease(path: Path, log: SqliteLog) -> None:
    token = claim(log, "worker")
    blocker = sqlite_driver.connect(f"{path}-cursors")
    blocker.execute("ALTER TABLE cursors RENAME TO hidden")

    with pytest.raises(LogError, match="no such table"):
        log.cursors.release("worker", token)
    blocker.execute("ALTER TABLE hidden RENAME TO cursors")
    blocker.close()

    assert log.cursors.list()[0].owner is None
    claim(log, "worker")


def test_a_released_name_is_free_although_another_process_inherited_its_file(log: SqliteLog) -> None:
    token = claim(log, "worker")
    inherited = os.dup(log.cursors._held["worker", token].lock._fd)  # as in a process that was forked in C

    log.cursors.release("worker", token)

    claim(log, "worker")
    os.close(inherited)


def test_a_user_who_may_use_the_cursors_may_use_their_locks(path: Path, log: SqliteLog) -> None:
    log.cursors.release("first", claim(log, "first"))
    shutil.rmtree(f"{path}-leases")
    Path(f"{path}-cursors").chmod(0o664)
    before = os.umask(0o077)  # of a user who claims the next name
    try:
        claim(log, "second")
    finally:
        os.umask(before)

    folder = Path(f"{path}-leases")
    assert folder.stat().st_mode & 0o777 == 0o775
    assert [each.stat().st_mode & 0o777 for each in folder.iterdir()] == [0o664]


def test_a_cursor_that_was_deleted_in_the_meantime_is_not_moved(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.cursors.release("worker", claim(log, "worker"))
    rows = log.cursors._rows()
    log.cursors.delete("worker")
    monkeypatch.setattr(log.cursors, "_rows", lambda: rows)

    with pytest.raises(CursorError, match="no such cursor"):
        log.cursors.reset("worker", 5)


def test_retention_needs_no_lock(path: Path, log: SqliteLog) -> None:
    other = open_log(BusConfig(log=str(path), read_only=True))
    claim(other, "worker", 3)
    other.close(5.0)  # its token stays, without a lock
    shutil.rmtree(f"{path}-leases")
    Path(f"{path}-leases").touch()  # a folder that cannot be used

    lowest = log.cursors.lowest()

    assert lowest is not None
    assert lowest.offset == 3
