"""Copies of the files of a log: one of a closed log opens, one of a log in use only if it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from backup_support import everything, fill, make_log
from cli_processes import Commands
from cold_support import epoch_of, write_segment
from log_support import ask, wait_until

from zbus.errors import LogDamaged
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus_log import Cold, Rules, SqliteLog
from zbus_log.backup.fork import fork
from zbus_log.backup.make import make_backup
from zbus_log.file.tables import BLOCK
from zbus_log.read import copied
from zbus_log.read.reader import readable
from zbus_log.read.verify import verify_files

SIDES = ("", "-wal", "-head", "-cursors", "-cursors-wal")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


call = Commands()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    call.close()


Command = tuple[str, ...]
COMMANDS: tuple[Command, ...] = (
    ("replay",),
    ("stats",),
    ("tail",),
    ("backup", "{target}"),
    ("fork", "{target}"),
    ("cursors",),
    ("purge", "--key", "shop/**", "--yes"),
    ("prune", "--until", "5"),
)


def run_command(command: Command, path: Path, tmp_path: Path) -> tuple[int, str]:
    """Run `zbus log`. Returns the exit code and stderr."""
    name, *rest = [each.format(target=tmp_path / "target") for each in command]
    done = call("log", name, path, *rest)
    return done.returncode, done.stderr.decode()


@contextmanager
def opened(path: Path) -> Iterator[SqliteLog]:
    log = SqliteLog(str(path))
    try:
        yield log
    finally:
        log.close(10.0)


def copy(path: Path, to: Path, *sides: str) -> Path:
    to.parent.mkdir(exist_ok=True)
    for side in sides or SIDES:
        if Path(f"{path}{side}").exists():
            shutil.copyfile(f"{path}{side}", f"{to}{side}")
    return to


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The logs that were read completely when they were opened."""
    found: list[str] = []

    def noted(path: str) -> object:
        found.append(path)
        return verify_files(path)

    monkeypatch.setattr(copied, "verify_files", noted)
    return found


def test_a_copy_of_a_closed_log_opens_at_once(path: Path, tmp_path: Path, checked: list[str]) -> None:
    make_log(path, 100, durable=50)

    with opened(copy(path, tmp_path / "other" / "app.db")) as log:
        assert fill(log, 1) == 101

    assert checked == []
    assert everything(tmp_path / "other" / "app.db")["cursors"][0][1] == 50


def test_a_complete_copy_of_a_log_in_use_is_checked_once_and_opens(
    path: Path, tmp_path: Path, checked: list[str]
) -> None:
    with opened(path) as log:
        fill(log, 5_000)
        to = copy(path, tmp_path / "copy.db")
        SqliteLog(str(path), read_only=True).close(1.0)  # the log itself is no copy
    SqliteLog(str(to), read_only=True).close(1.0)  # a reader cannot store that it was checked
    with opened(to) as log:
        assert log.head() == 5_000
    with opened(to) as log:
        assert fill(log, 1) == 5_001

    assert checked == [str(to), str(to)]


def test_a_copy_of_a_log_in_use_without_its_newest_events_is_refused(path: Path, tmp_path: Path) -> None:
    with opened(path) as log:
        fill(log, 5_000, batch=100)
        to = copy(path, tmp_path / "copy.db", "", "-head")  # the write-ahead log is missing

    for _ in range(2):  # refusing it does not make it look as if it had been closed
        with pytest.raises(LogDamaged) as caught:
            SqliteLog(str(to))
        assert f"zbus log backup {path} FILE" in str(caught.value)
        assert caught.value.missing is None or caught.value.missing[1] == 5_000


@pytest.fixture
def torn(path: Path, tmp_path: Path) -> Path:
    """A copy of a log in use with an old page of events, as if it had been copied before it was written."""
    with opened(path) as log:
        fill(log, 5_000)
    with opened(path) as log:
        fill(log, 10)
        to = copy(path, tmp_path / "copy.db")
    with to.open("r+b") as file:
        file.seek(8192 * 20)
        file.write(bytes(8192))
    return to


def test_a_copy_with_damage_before_its_newest_events_is_refused(torn: Path) -> None:
    for read_only in (True, False):
        with pytest.raises(LogDamaged, match="made while that was in use, and is not complete"):
            SqliteLog(str(torn), read_only=read_only)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_refuses_a_torn_copy(torn: Path, tmp_path: Path, command: Command) -> None:
    code, error = run_command(command, torn, tmp_path)

    assert code == 1
    assert "made while that was in use, and is not complete" in error
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_refuses_a_log_without_its_newest_events(path: Path, tmp_path: Path, command: Command) -> None:
    make_log(path, 10, durable=5)
    older = copy(path, tmp_path / "older.db", "")
    with opened(path) as log:
        fill(log, 40)
    shutil.copyfile(older, path)

    code, error = run_command(command, path, tmp_path)

    assert code == 1
    assert "the log ends at offset 10, but 50 was acknowledged; missing: offsets 11 to 50" in error
    assert not (tmp_path / "target").exists()


def test_backups_forks_and_readers_of_a_complete_copy_read_all_of_it_once(
    path: Path, tmp_path: Path, checked: list[str]
) -> None:
    with opened(path) as log:
        fill(log, 100)
        to = copy(path, tmp_path / "copy.db")

    assert make_backup(str(to), str(tmp_path / "app.zbus")).cut == 100
    assert make_backup(str(to), str(tmp_path / "app.zbus")).added == 0
    assert fork(str(to), str(tmp_path / "fork.db")).cut == 100
    for _ in range(3):
        readable(str(to)).dispose()

    assert checked == [str(to)]


def test_a_copy_that_was_damaged_after_it_was_checked_is_refused(torn: Path, path: Path) -> None:
    shutil.copyfile(path, torn)
    readable(str(torn)).dispose()

    with torn.open("r+b") as file:
        file.seek(8192 * 20)
        file.write(bytes(8192))

    with pytest.raises(LogDamaged, match="is not complete"):
        readable(str(torn))


def test_a_complete_copy_opens_although_its_cold_tier_is_elsewhere(path: Path, tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with opened(path) as log:
        fill(log, BLOCK + 100)
        wait_until(lambda: ask(path, "SELECT count(*) FROM blocks") == 1)
        Cold(tier).add([write_segment(path, str(tier), 1, BLOCK - 1)], epoch_of(path))
        log.prune(Rules(until=BLOCK - 1, ignore_cursors=True, offloaded=True))
        to = copy(path, tmp_path / "copy.db")

    log = SqliteLog(str(to), read_only=True, cold=str(tier))
    try:
        assert log.read(KeySet.all(), Span(0), 10).events()[0][0].offset == 1
    finally:
        log.close(5.0)


def test_damaged_cursors_of_a_copy_are_refused(path: Path, tmp_path: Path) -> None:
    make_log(path, 10, durable=5)
    with opened(path) as log:
        fill(log, 10)
        to = copy(path, tmp_path / "copy.db")
    with Path(f"{to}-cursors").open("r+b") as file:
        file.seek(4096)
        file.write(b"\\xff" * 4096)

    with pytest.raises(LogDamaged, match=r"copy\.db-cursors"):
        SqliteLog(str(to))


def test_a_log_whose_owner_was_killed_opens_without_reading_all_of_it(path: Path, checked: list[str]) -> None:
    child = os.fork()
    if child == 0:
        log = SqliteLog(str(path))
        fill(log, 500)
        os._exit(0)  # without closing it
    os.waitpid(child, 0)
    path.rename(path.with_name("moved.db"))
    for side in SIDES[1:]:
        if Path(f"{path}{side}").exists():
            Path(f"{path}{side}").rename(path.with_name(f"moved.db{side}"))

    with opened(path.with_name("moved.db")) as log:
        assert log.head() == 500

    assert checked == []


def test_a_record_that_does_not_say_which_file_the_log_is_stays_readable(
    path: Path, tmp_path: Path, checked: list[str]
) -> None:
    with opened(path) as log:
        fill(log, 10)
        to = copy(path, tmp_path / "copy.db")
    with Path(f"{to}-head").open("r+b") as file:  # as version 0.1 wrote it
        file.seek(192)
        file.write(bytes(4096 - 192))

    with opened(to) as log:
        assert log.head() == 10

    assert checked == []
