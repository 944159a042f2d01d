"""The incarnations of a log in its file and its head record, through openings, copies, migrations and full disks."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from log_support import append, ask, opened, raw, wait_until

from zbus import BusConfig
from zbus.errors import LogError, LogFull, LogReadOnly
from zbus.keys import KeySet
from zbus.ports.lineage import Incarnation, Lineage
from zbus.ports.log import Row, Span, Stored, Unknown
from zbus_log import SqliteLog, open_log, verify
from zbus_log.file import incarnations, sqlite_driver, tables
from zbus_log.file.head_record import _SLOT, _SLOTS_AT, _WITHOUT_INCARNATION, read_record
from zbus_log.file.tables import VERSION

DATA = Path(__file__).parents[1] / "data"
OLD = DATA / "v1" / "log.db"  # of version 0.1

# Kills one child at each statement of an opening, until one gets to its end. Prints how many were killed.
KILLED_AT_EACH_STATEMENT = """
import os, shutil, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from zbus import BusConfig
from zbus_log import open_log

old, folder = sys.argv[1:]
for kill_at in range(1, 1000):
    path = f"{folder}/{kill_at}.db"
    for suffix in ("", "-head"):
        shutil.copyfile(old + suffix, path + suffix)
    child = os.fork()
    if child == 0:
        left = kill_at

        @event.listens_for(Engine, "before_cursor_execute")
        def count(*_):
            global left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        log = open_log(BusConfig(log=path))
        log.close(5.0)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
print(kill_at - 1)
"""


def row(sequence: int) -> Row:
    return Row(1, sequence, sequence, "a/b", b"payload-%d" % sequence, None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def old(path: Path) -> Path:
    """A log that version 0.1 wrote."""
    for suffix in ("", "-head"):
        shutil.copyfile(f"{OLD}{suffix}", f"{path}{suffix}")
    return path


def stored(path: Path) -> list[tuple[int, int]]:
    connection = raw(path)
    found = connection.execute("SELECT id, first FROM incarnations ORDER BY ordinal").fetchall()
    connection.close()
    return [tuple(each) for each in found]


def test_each_opening_by_an_owner_is_an_incarnation_from_the_next_offset(path: Path) -> None:
    began = time.time_ns()
    lineages = []
    for number in range(3):
        with opened(path) as log:
            lineages.append(log.lineage)
            append(log, [row(number * 10 + n) for n in range(10)])

    last = lineages[-1].incarnations
    assert [each.first for each in last] == [1, 11, 21]
    assert [len(each.incarnations) for each in lineages] == [1, 2, 3]
    assert lineages[1].incarnations == last[:2]
    assert all(0 < each.id < 1 << 62 and each.host == socket.gethostname() for each in last)
    assert began <= last[0].started_at < last[1].started_at < last[2].started_at <= time.time_ns()
    assert stored(path) == [(each.id, each.first) for each in last]
    head = read_record(str(path))
    assert head is not None
    assert head.incarnation == last[-1].id


def test_an_opening_that_stores_nothing_is_an_incarnation_too(path: Path) -> None:
    for _ in range(3):
        with opened(path):
            pass

    assert [first for _, first in stored(path)] == [1, 1, 1]


def test_a_reader_sees_the_incarnations_of_a_running_owner_and_begins_none(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(0)])
        with opened(path, read_only=True) as reader:
            assert reader.lineage == log.lineage
            begun = log.begin_incarnation()
            assert reader.lineage == log.lineage
            assert reader.lineage.current == begun
            with pytest.raises(LogReadOnly):
                reader.begin_incarnation()


def test_an_incarnation_begun_in_between_comes_after_the_events_that_were_appended_before(path: Path) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with opened(path) as log:
        for sequence in range(200):
            log.append([row(sequence)], answers.put, None)
        begun = log.begin_incarnation()
        after = append(log, [row(200)])
        lineage = log.lineage
        killed = path.with_name("killed.db")
        for suffix in ("", "-wal", "-head"):
            shutil.copyfile(f"{path}{suffix}", f"{killed}{suffix}")

    assert begun.first == 201
    assert after == [201]
    assert lineage.current == begun
    record = read_record(str(killed))
    assert record is not None
    assert record.incarnation == begun.id
    with opened(killed) as log:
        assert log.lineage.incarnations[:2] == lineage.incarnations


def test_only_the_newest_incarnations_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnations, "KEPT_MAX", 5)
    for _ in range(7):
        with opened(path) as log:
            begun = log.begin_incarnation()
            assert len(log.lineage.incarnations) <= 5

    assert len(stored(path)) == 5
    assert stored(path)[-1][0] == begun.id
    assert [each.id for each in log.lineage.incarnations] == [id_ for id_, _ in stored(path)]


def test_after_an_accepted_loss_the_incarnation_begins_after_the_reserved_offsets(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(n) for n in range(5)])
    connection = raw(path)
    connection.execute("UPDATE state SET low_water = 5")  # so that the trigger permits it
    connection.execute("DELETE FROM events WHERE offset > 3")
    connection.execute("UPDATE state SET low_water = 0")
    connection.close()

    with opened(path, accept_loss=True) as log:
        begun = log.lineage.current
        assert append(log, [row(100)]) == [begun.first]
    assert begun.first > 1 << 20


# Older files


def test_a_reader_of_an_old_file_has_one_incarnation_without_an_id(old: Path) -> None:
    with opened(old, read_only=True) as reader:
        assert reader.lineage == Lineage((Incarnation(0, 1),))
        assert reader.digest(reader.head()) == b""


def test_an_old_file_has_an_incarnation_without_an_id_and_then_its_own(old: Path) -> None:
    with opened(old) as log:
        head = log.head()
        first, second = log.lineage.incarnations
        append(log, [row(1 << 40)])

    assert (first.id, first.first) == (0, 1)
    assert second.id
    assert second.first == head + 1
    assert log.lineage.until(0) == head


def test_an_old_file_survives_a_kill_at_each_statement_of_its_migration(old: Path, tmp_path: Path) -> None:
    with opened(old, read_only=True) as reader:
        head, low_water = reader.head(), reader.low_water()
        events = _events(reader)
    folder = tmp_path / "killed"
    folder.mkdir()

    command = [sys.executable, "-c", KILLED_AT_EACH_STATEMENT, str(OLD), str(folder)]
    killed = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)

    assert killed > 15
    versions = set()
    for number in range(1, killed + 1):
        path = folder / f"{number}.db"
        versions.add(ask(path, "PRAGMA user_version"))
        with opened(path) as log:
            assert (log.head(), log.low_water(), log.lineage.current.first) == (head, low_water, head + 1)
            assert log.lineage.until(0) == head
            assert _events(log) == events
            assert append(log, [row(1 << 40)]) == [head + 1]
    assert versions >= {2, VERSION}


def _events(log: SqliteLog) -> list[tuple[int, str, bytes]]:
    after = log.low_water()
    events, error, _ = log.read(KeySet(["**"]), Span(after), 300).events()
    assert error is None
    return [(event.offset, event.key, event.payload) for event in events]


def test_a_migration_that_fails_changes_nothing(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(connection: Any) -> None:
        tables._add_lineage(connection)
        raise sqlite_driver.Error("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(tables, "MIGRATIONS", (*tables.MIGRATIONS[: tables.LINEAGE_SINCE - 1], fail))
        with pytest.raises(LogError, match="the disk is gone"):
            open_log(BusConfig(log=str(old)))

    assert ask(old, "SELECT count(*) FROM sqlite_schema WHERE name IN ('incarnations', 'removed')") == 0
    with opened(old) as log:
        assert [each.id == 0 for each in log.lineage.incarnations] == [True, False]


# The head record


def test_a_head_record_of_version_0_1_is_read_and_a_torn_incarnation_is_noticed(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(0)])
        append(log, [row(1)])
        record = Path(f"{path}-head")
        data = bytearray(record.read_bytes())
        older, newer = sorted(_SLOTS_AT, key=lambda at: _SLOT.unpack_from(data, at)[3])
        current = log.lineage.current.id

    for at in _SLOTS_AT:
        end = at + _SLOT.size
        data[end - len(_WITHOUT_INCARNATION) : end] = _WITHOUT_INCARNATION
    Path(f"{path}.old-head").write_bytes(data)
    found = read_record(f"{path}.old")
    assert found is not None
    assert (found.head, found.incarnation) == (2, 0)

    data = bytearray(record.read_bytes())
    data[newer + _SLOT.size - 8] ^= 1
    Path(f"{path}.torn-head").write_bytes(data)
    found = read_record(f"{path}.torn")
    assert found is not None
    assert (found.head, found.incarnation) == (1, current)
    assert older != newer


@pytest.mark.parametrize("at", [0, 1, 2], ids=["to create it", "to own it", "to update it"])
def test_a_full_disk_at_opening_is_an_error_and_leaves_a_log_that_opens(
    path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    write, calls = os.pwrite, 0

    def full(fd: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr("zbus_log.file.head_record.os.pwrite", full)
        with pytest.raises(LogFull):
            open_log(BusConfig(log=str(path)))

    with opened(path) as log:
        assert append(log, [row(0)]) == [1]
    assert verify(str(path)).problems == []


def test_a_head_record_that_was_written_in_part_is_not_left_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr("zbus_log.file.head_record.os.pwrite", lambda fd, data, offset: write(fd, data[:100], offset))
        with pytest.raises(LogFull):
            open_log(BusConfig(log=str(path)))

    with opened(path) as log:
        assert append(log, [row(0)]) == [1]


def test_a_disk_that_is_full_while_running_is_an_unknown_outcome_until_there_is_space(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail: list[int] = []
    with opened(path) as log:
        append(log, [row(0)])
        log.tail(lambda committed: tail.extend(committed.offsets))

        def full(fd: int, data: bytes, offset: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("zbus_log.file.head_record.os.pwrite", full)
            first = outcome(log, [row(1)])
            second = outcome(log, [row(2)])
            again = outcome(log, [row(1)])
        later = outcome(log, [row(1)]), outcome(log, [row(2)])
        newest = read_record(str(path))

    assert isinstance(first, Unknown)
    assert isinstance(first.error, LogFull)
    assert isinstance(second.error, LogFull)
    assert second.error.outcome == again.error.outcome == "refused"
    assert [each.offsets for each in later if isinstance(each, Stored)] == [[2], range(3, 4)]
    assert tail == [2, 3]
    assert newest is not None
    assert newest.head == 3
    assert verify(str(path)).problems == []


def outcome(log: SqliteLog, rows: list[Row]) -> Any:
    answers: SimpleQueue[Any] = SimpleQueue()
    log.append(rows, answers.put, None)
    return answers.get(timeout=20.0).outcome


def test_no_event_is_stored_before_the_incarnation_that_stores_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, fail = incarnations.add_incarnation, True

    def add_if(connection: Any, begun: Incarnation) -> None:
        if fail:
            raise sqlite_driver.Error("the disk is busy")
        add(connection, begun)

    monkeypatch.setattr("zbus_log.write.writer.add_incarnation", add_if)
    with opened(path) as log:
        refused = outcome(log, [row(0)])
        fail = False
        assert append(log, [row(0)]) == [1]
        wait_until(lambda: stored(path) == [(log.lineage.current.id, 1)])

    assert "the disk is busy" in str(refused.error)
    assert refused.error.outcome == "refused"
