"""Backups: what they contain, increments, other histories, and what an interrupted one leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from backup_support import everything, fill, info, make_log, set_cursor, tables
from log_support import raw, sealed_blocks

from zbus.errors import ConfigInvalid, LogDamaged, LogError
from zbus.keys import KeySet
from zbus_log import Rules, SqliteLog, verify
from zbus_log.backup import log_copy
from zbus_log.backup.backup_file import NAME
from zbus_log.backup.check import verify_backup
from zbus_log.backup.log_copy import LogCopy
from zbus_log.backup.make import make_backup
from zbus_log.backup.restore import restore

EVENTS = 10_000  # two sealed blocks and a part of the third


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    make_log(path, EVENTS, durable=9_000)
    return path


def restored(backup: Path) -> Path:
    """A log that is made of a backup, in a folder of its own."""
    folder = backup.parent / f"restored-{time.monotonic_ns()}"
    folder.mkdir()
    restore(str(backup), str(folder / "app.db"))
    return folder / "app.db"


@pytest.mark.parametrize("target", ["app.zbus", "folder/"])
def test_a_restored_backup_has_everything_that_the_log_had(log: Path, tmp_path: Path, target: str) -> None:
    made = make_backup(str(log), f"{tmp_path}/{target}")

    again = restored(tmp_path / target)

    assert (made.cut, made.added) == (EVENTS, EVENTS)
    assert everything(again) == everything(log)
    assert everything(again)["cursors"][0][:2] == ("billing", 9_000)
    assert verify(str(again)).problems == []
    assert sealed_blocks(again) == sealed_blocks(log) == 2


def test_a_restored_log_begins_a_new_incarnation_and_its_cursors_resume(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    path = restored(tmp_path / "app.zbus")

    opened = SqliteLog(str(path))
    try:
        incarnations = opened.lineage.incarnations
        lease = opened.cursors.claim("billing", ["shop/**"], 0)
        assert fill(opened, 3) == EVENTS + 3
    finally:
        opened.close(10.0)

    assert lease.offset == 9_000
    assert (len(incarnations), incarnations[-1].first) == (2, EVENTS + 1)
    assert verify(str(path)).problems == []


def test_rows_and_pages_give_the_same_copy(log: Path, tmp_path: Path) -> None:
    by_pages, by_rows = tmp_path / "pages.db", tmp_path / "rows.db"

    assert LogCopy(str(log), str(by_pages)).whole() == LogCopy(str(log), str(by_rows)).whole(bytes_max=0)

    assert tables(by_pages) == tables(by_rows) == tables(log)


def test_an_increment_adds_only_new_events_and_gives_what_a_full_backup_would(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    opened = SqliteLog(str(log))
    fill(opened, 5_000)
    set_cursor(opened, "billing", 14_000)
    set_cursor(opened, "audit", 3)
    opened.close(10.0)

    added = make_backup(str(log), f"{tmp_path}/app.zbus")
    nothing = make_backup(str(log), f"{tmp_path}/app.zbus")

    assert (added.cut, added.added) == (15_000, 5_000)
    assert (nothing.cut, nothing.added) == (15_000, 0)
    assert tables(tmp_path / "app.zbus") == tables(log)
    assert everything(restored(tmp_path / "app.zbus")) == everything(log)
    assert verify_backup(f"{tmp_path}/app.zbus").problems == []


def test_an_increment_follows_retention(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    opened = SqliteLog(str(log))
    fill(opened, 100)
    opened.prune(Rules(until=6_000))
    opened.close(10.0)

    added = make_backup(str(log), f"{tmp_path}/app.zbus")

    assert (added.cut, added.added) == (10_100, 100)
    assert tables(tmp_path / "app.zbus") == tables(log)
    assert everything(restored(tmp_path / "app.zbus"))["low_water"] == 6_000


def test_a_backup_is_made_anew_if_retention_removed_all_that_it_has(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    opened = SqliteLog(str(log))
    fill(opened, 1_000)
    opened.prune(Rules(until=10_500, ignore_cursors=True))
    opened.close(10.0)

    made = make_backup(str(log), f"{tmp_path}/app.zbus")

    assert (made.cut, made.added) == (11_000, 500)
    assert tables(tmp_path / "app.zbus") == tables(log)


def test_an_increment_of_another_log_is_refused(log: Path, tmp_path: Path) -> None:
    make_log(tmp_path / "other.db", 20)
    make_backup(str(log), f"{tmp_path}/app.zbus")
    before = (tmp_path / "app.zbus").read_bytes()

    with pytest.raises(ConfigInvalid, match="the backup of another history: it is of the log"):
        make_backup(f"{tmp_path}/other.db", f"{tmp_path}/app.zbus")

    assert (tmp_path / "app.zbus").read_bytes() == before
    assert sorted(each.name for each in tmp_path.glob(".*")) == []


def test_an_increment_of_a_log_that_was_restored_to_an_earlier_offset_is_refused(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/early.zbus")
    opened = SqliteLog(str(log))
    fill(opened, 10)
    opened.close(10.0)
    make_backup(str(log), f"{tmp_path}/late.zbus")
    path = restored(tmp_path / "early.zbus")
    with pytest.raises(ConfigInvalid, match="events up to offset 10010, and this log only up to 10000"):
        make_backup(str(path), f"{tmp_path}/late.zbus")
    opened = SqliteLog(str(path))
    fill(opened, 20)
    opened.close(10.0)

    with pytest.raises(ConfigInvalid, match="this log was restored to offset"):
        make_backup(str(path), f"{tmp_path}/late.zbus")
    assert make_backup(str(path), f"{tmp_path}/early.zbus").cut == 10_020  # it continues this one


def test_an_increment_compares_the_events_themselves(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    connection = raw(tmp_path / "app.zbus")
    connection.execute("UPDATE backup SET digest = x'00112233445566778899aabbccddeeff'")
    connection.close()

    with pytest.raises(ConfigInvalid, match="its events up to offset 10000 differ"):
        make_backup(str(log), f"{tmp_path}/app.zbus")


def test_a_file_that_is_not_a_backup_is_not_overwritten(log: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    make_log(tmp_path / "other.db", 5)

    with pytest.raises(LogDamaged):
        make_backup(str(log), f"{tmp_path}/notes.txt")
    with pytest.raises(ConfigInvalid, match="is not a backup"):
        make_backup(str(log), f"{tmp_path}/other.db")
    with pytest.raises(ConfigInvalid, match="is the log itself"):
        make_backup(str(log), str(log))

    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_retention_that_overtakes_the_copy_makes_it_begin_anew(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SqliteLog(str(log))
    steps = 0

    def prune_once() -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            opened.prune(Rules(until=8_500))

    monkeypatch.setattr(log_copy, "STEP_EVENTS", 100)
    try:
        copied = LogCopy(str(log), str(tmp_path / "copy.db"), check=prune_once).rows()
    finally:
        opened.close(10.0)

    assert (copied.low_water, copied.cut) == (8_500, EVENTS)
    assert tables(tmp_path / "copy.db") == tables(log)


def test_a_gap_in_the_log_is_reported_and_no_backup_is_made(log: Path, tmp_path: Path) -> None:
    connection = raw(log)
    connection.execute("DROP TRIGGER events_are_not_deleted")
    connection.execute("DELETE FROM events WHERE offset = 5000")
    connection.close()

    with pytest.raises(LogDamaged, match="events are missing between"):
        LogCopy(str(log), str(tmp_path / "copy.db")).rows()


def test_verification_of_a_backup_finds_a_changed_event(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    connection = raw(tmp_path / "app.zbus")
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.execute("UPDATE events SET payload = x'00' WHERE offset = 77")
    connection.close()

    assert any("77" in problem for problem in verify_backup(f"{tmp_path}/app.zbus").problems)


@pytest.mark.parametrize("target", ["app.zbus", f"folder/{NAME}"])
def test_a_full_copy_with_a_damaged_event_does_not_replace_a_backup(log: Path, tmp_path: Path, target: str) -> None:
    file = tmp_path / target
    made = make_backup(str(log), str(file).removesuffix(NAME))
    before = file.read_bytes()
    connection = raw(log)
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.execute("UPDATE events SET payload = x'00' WHERE offset = 77")
    connection.close()
    opened = SqliteLog(str(log))
    try:
        purged = opened.purge(KeySet(["shop/1/new"]))  # so that the next backup is a full copy
    finally:
        opened.close(10.0)

    with pytest.raises(LogDamaged, match=r"offset 77.*was not replaced"):
        make_backup(str(log), made.path)

    assert file.read_bytes() == before
    assert verify_backup(made.path).problems == []
    assert not list(file.parent.glob(".*partial*"))
    another = make_backup(str(log), f"{tmp_path}/another.zbus")
    assert (another.cut, another.added) == (EVENTS, EVENTS - purged.removed)


# Beside an owner that writes.

WRITER = """
import os, sys
sys.path[:0] = {path!r}
from backup_support import fill, set_cursor
from zbus_log import SqliteLog
log = SqliteLog(sys.argv[1])
os.write(1, b"ready")
lease = log.cursors.claim("live", ["shop/**"], 0)
while True:
    head = fill(log, 50, batch=5)
    log.cursors.advance("live", lease.token, head)
"""


@pytest.mark.parametrize("bytes_max", [None, 0], ids=["pages", "rows"])
def test_backups_beside_a_writing_process_are_complete(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int | None
) -> None:
    if bytes_max is not None:
        monkeypatch.setattr(LogCopy.whole, "__defaults__", (bytes_max,))
    writer = subprocess.Popen([sys.executable, "-c", WRITER.format(path=sys.path), str(log)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        assert writer.stdout.read(5) == b"ready"
        cuts = []
        for number in range(8):  # four full ones, each with an increment
            target = f"{tmp_path}/{number // 2}.zbus"
            cuts.append(make_backup(str(log), target).cut)
            again = restored(Path(target))
            assert verify(str(again)).problems == []
            assert all(offset <= cuts[-1] for _, offset, _, _ in everything(again)["cursors"])
            shutil.rmtree(again.parent)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert cuts == sorted(set(cuts))


# Interrupted.


def interrupt(at: int) -> Callable[[], None]:
    """A check that raises when it is called for the `at`th time."""
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise LogError("stop here")

    return check


def test_an_interrupted_backup_leaves_the_earlier_one_as_it_was(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_copy, "STEP_EVENTS", 5)
    monkeypatch.setattr(log_copy, "STEP_S", 0.0)
    make_backup(str(log), f"{tmp_path}/app.zbus")
    opened = SqliteLog(str(log))
    fill(opened, 60)
    opened.close(10.0)
    before = (tmp_path / "app.zbus").read_bytes()

    for at in range(1, 200):
        try:
            make_backup(str(log), f"{tmp_path}/app.zbus", check=interrupt(at))
            break
        except LogError:
            assert (tmp_path / "app.zbus").read_bytes() == before
            assert sorted(each.name for each in tmp_path.glob(".*")) == []
    assert at > 10


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from zbus_log.backup import log_copy
from zbus_log.backup.backup_file import NAME
from zbus_log.backup.make import make_backup
log_copy.STEP_EVENTS = 200
log_copy.STEP_PAGES = 16
left = int(sys.argv[3])
def check():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
sys.setprofile(lambda frame, event, arg: check() if event == "c_call" and arg.__name__ in {calls!r} else None)
make_backup(sys.argv[1], sys.argv[2])
"""
CALLS = {"execute", "fsync", "replace", "flock", "unlink", "open", "backup"}


def killed_backup(log: Path, target: Path, at: int) -> bool:
    """Make a backup in a process that kills itself at a call of the system or of SQLite. Returns whether it did."""
    program = KILLED.format(path=sys.path, calls=CALLS)
    done = subprocess.run([sys.executable, "-c", program, str(log), str(target), str(at)], check=False)
    assert done.returncode in (0, -signal.SIGKILL)
    return done.returncode != 0


@pytest.mark.parametrize("increment", [False, True], ids=["full", "increment"])
@pytest.mark.timeout(240)
def test_a_killed_backup_leaves_the_earlier_one_usable(log: Path, tmp_path: Path, increment: bool) -> None:
    target = tmp_path / "app.zbus"
    if increment:
        make_backup(str(log), str(target))
        opened = SqliteLog(str(log))
        fill(opened, 1_000, padding=10_000)  # more than SQLite keeps in memory until it commits
        opened.close(10.0)
    at, cuts = 1, set()
    while killed_backup(log, target, at):
        at += 9 if at < 40 else 23
        if not target.exists():
            assert not increment
            continue
        again = restored(target)
        assert verify(str(again)).problems == []
        cuts.add(info(target)["cut"])
        assert cuts <= {EVENTS, EVENTS + 1_000}
        shutil.rmtree(again.parent)
    assert at > 30
    final = make_backup(str(log), str(target))
    assert final.cut == everything(log)["head"]
    assert tables(target) == tables(log)
    assert sorted(each.name for each in tmp_path.glob(".app*")) == []


def test_two_backups_into_one_file_wait_for_each_other(log: Path, tmp_path: Path) -> None:
    done: list[int] = []
    threads = [
        threading.Thread(target=lambda: done.append(make_backup(str(log), f"{tmp_path}/app.zbus").added))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sorted(done) == [0, 0, EVENTS]
    assert verify_backup(f"{tmp_path}/app.zbus").problems == []
    assert os.listdir(tmp_path).count("app.zbus") == 1
