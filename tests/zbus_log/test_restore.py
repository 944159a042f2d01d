"""Restoring a backup and forking a log: what is refused, what is moved aside, and what a fork may do."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from backup_support import START_NS, STEP_NS, everything, fill, make_log, set_cursor, tables
from cold_support import offload

import zbus
from zbus.errors import ConfigInvalid, CursorError, LogDamaged, LogError, LogLocked
from zbus_log import ColdDamaged, Rules, SqliteLog, verify
from zbus_log.backup.check import verify_backup
from zbus_log.backup.fork import fork, promote
from zbus_log.backup.log_copy import LogCopy
from zbus_log.backup.make import make_backup
from zbus_log.backup.new_log import NewLog
from zbus_log.backup.restore import restore

EVENTS = 9_000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    make_log(path, EVENTS, durable=8_000)
    return path


def parts(folder: Path, name: str) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.name.startswith(name))


def test_an_existing_log_is_not_replaced_unless_it_is_said(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    before = log.read_bytes()

    with pytest.raises(ConfigInvalid, match="exists already"):
        restore(f"{tmp_path}/app.zbus", str(log))

    assert log.read_bytes() == before
    assert parts(tmp_path, ".app") == []


@pytest.mark.parametrize("left", ["-wal", "-cursors", "-head", "-cold"])
def test_a_part_of_an_older_log_is_not_mixed_with_the_restored_one(log: Path, tmp_path: Path, left: str) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    (tmp_path / "place").mkdir()
    place = tmp_path / "place" / "new.db"
    Path(f"{place}{left}").write_bytes(b"of another log")

    with pytest.raises(ConfigInvalid, match="exists already"):
        restore(f"{tmp_path}/app.zbus", str(place))
    made = restore(f"{tmp_path}/app.zbus", str(place), replace=True)

    assert made.replaced is not None
    assert Path(f"{made.replaced}{left}").read_bytes() == b"of another log"
    assert everything(place) == everything(log)
    assert verify(str(place)).problems == []


def test_a_replaced_log_is_moved_aside_whole_and_can_be_opened_there(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    opened = SqliteLog(str(log))
    fill(opened, 10)
    set_cursor(opened, "billing", 9_005)
    opened.close(10.0)
    newer = everything(log)

    made = restore(f"{tmp_path}/app.zbus", str(log), replace=True)

    assert (made.cut, made.replaced_head) == (EVENTS, EVENTS + 10)
    assert everything(log)["head"] == EVENTS
    assert everything(log)["cursors"][0][1] == 8_000
    assert made.replaced is not None
    SqliteLog(made.replaced).close(5.0)
    assert everything(Path(made.replaced)) == newer


def test_a_restore_that_ends_halfway_never_leaves_a_log_of_mixed_files(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    opened = SqliteLog(str(log))
    fill(opened, 10)
    set_cursor(opened, "billing", 9_005)
    opened.close(10.0)
    outcomes: set[object] = set()
    rename, replace = Path.rename, Path.replace
    for at in range(1, 20):
        place = tmp_path / f"place-{at}"
        place.mkdir()
        for side in ("", "-head", "-cursors"):
            shutil.copyfile(f"{log}{side}", place / f"app.db{side}")
        left = at

        def move(self: Path, target: object, how: Callable[..., Path]) -> Path:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError("stop here")
            return how(self, target)

        monkeypatch.setattr(Path, "rename", lambda self, target: move(self, target, rename))
        monkeypatch.setattr(Path, "replace", lambda self, target: move(self, target, replace))
        try:
            restore(f"{tmp_path}/app.zbus", str(place / "app.db"), replace=True)
            whole = True
        except OSError:
            whole = False
        monkeypatch.undo()
        try:
            SqliteLog(str(place / "app.db")).close(5.0)
            found = everything(place / "app.db")
            outcomes.add((found["head"], found["cursors"][0][1]))
        except LogDamaged:
            outcomes.add("refused")
        if whole:
            break

    assert outcomes == {(EVENTS + 10, 9_005), "refused", (EVENTS, 8_000)}


KILLED_RESTORE = """
import os, sys
from pathlib import Path
left = int(sys.argv[3])
def counted(move):
    def moved(*paths):
        global left
        left -= "app.db" in str(paths[0])
        return os._exit(9) if left < 0 else move(*paths)
    return moved
Path.rename, Path.replace = counted(Path.rename), counted(Path.replace)
from zbus_log.backup.restore import restore
restore(sys.argv[1], sys.argv[2], replace=True)
"""


def test_a_killed_replacement_is_continued_and_keeps_the_old_log_under_one_name(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    opened = SqliteLog(str(log))
    fill(opened, 10)
    set_cursor(opened, "billing", 9_005)
    opened.close(10.0)
    newer = everything(log)
    status = 9
    for at in range(20):
        place = tmp_path / f"place-{at}"
        place.mkdir()
        for side in ("", "-head", "-cursors"):
            shutil.copyfile(f"{log}{side}", place / f"app.db{side}")
        arguments = [sys.executable, "-c", KILLED_RESTORE, f"{tmp_path}/app.zbus", str(place / "app.db"), str(at)]
        status = subprocess.run(arguments, check=False, timeout=60).returncode
        assert status in (0, 9)
        if status == 0:
            break

        restore(f"{tmp_path}/app.zbus", str(place / "app.db"), replace=True)

        old = sorted(place.glob("app.db.replaced-*"))
        (name,) = [each for each in old if not each.name.endswith(("-head", "-cursors"))]
        SqliteLog(str(name)).close(5.0)
        assert everything(name) == newer
        assert everything(place / "app.db")["head"] == EVENTS
        assert not list(place.glob(".*.new-*"))
    assert (status, at) == (0, 5)


def test_the_folder_of_a_restore_that_is_still_running_is_left_alone(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    target = str(tmp_path / "again.db")
    with NewLog(target) as first:
        (tmp_path / ".again.db.new-0000").mkdir()
        with NewLog(target):
            folders = [each.name for each in tmp_path.glob(".again.db.new-*")]

        assert len(folders) == 2
        assert Path(first.path).parent.name in folders


def test_a_log_that_a_process_owns_is_not_replaced(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    opened = SqliteLog(str(log))
    try:
        with pytest.raises(LogLocked):
            restore(f"{tmp_path}/app.zbus", str(log), replace=True)
        assert fill(opened, 1) == EVENTS + 1
    finally:
        opened.close(5.0)
    assert parts(tmp_path, ".app") == []


@pytest.mark.parametrize("by_time", [False, True])
def test_a_backup_is_restored_up_to_an_offset_or_a_time(log: Path, tmp_path: Path, by_time: bool) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    at = datetime.fromtimestamp((START_NS + 5_000 * STEP_NS) // 10**9, UTC) if by_time else 5_000

    made = restore(f"{tmp_path}/app.zbus", f"{tmp_path}/early.db", at=at)

    found = everything(tmp_path / "early.db")
    assert (made.cut, found["head"]) == (5_000, 5_000)
    assert found["events"] == everything(log)["events"][:5_000]
    assert found["cursors"][0][1] == 5_000  # it had acknowledged all of them
    assert verify(f"{tmp_path}/early.db").problems == []
    opened = SqliteLog(f"{tmp_path}/early.db")
    try:
        assert opened.cursors.claim("billing", ["shop/**"], 0).offset == 5_000
        assert fill(opened, 5_000) == 10_000  # across a block that was sealed in the log, and is sealed here again
    finally:
        opened.close(10.0)
    assert verify(f"{tmp_path}/early.db").problems == []


def test_a_cursor_that_cannot_be_used_is_not_moved_to_the_offset_of_a_restore(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/full.zbus")
    restore(f"{tmp_path}/full.zbus", f"{tmp_path}/early.db", at=5_000)
    Path(f"{tmp_path}/early.db-cursors").write_bytes(Path(f"{log}-cursors").read_bytes())
    opened = SqliteLog(f"{tmp_path}/early.db")
    fill(opened, 5_000)  # other events than those that the cursor at 8,000 acknowledged
    set_cursor(opened, "shipping", 9_000)
    opened.close(10.0)
    make_backup(f"{tmp_path}/early.db", f"{tmp_path}/early.zbus")

    restore(f"{tmp_path}/early.zbus", f"{tmp_path}/again.db", at=6_000)

    again = SqliteLog(f"{tmp_path}/again.db")
    try:
        assert [(each.name, each.offset) for each in again.cursors.list()] == [("billing", 8_000), ("shipping", 6_000)]
        fill(again, 4_000)
        with pytest.raises(CursorError, match=r"zbus log cursors .* --reset billing"):
            again.cursors.claim("billing", ["shop/**"], 0)
        assert again.cursors.claim("shipping", ["shop/**"], 0).offset == 6_000
    finally:
        again.close(10.0)


def test_an_offset_that_the_log_does_not_have_is_refused(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")

    with pytest.raises(ConfigInvalid, match="offset 9001 is not in the file of the log"):
        restore(f"{tmp_path}/app.zbus", f"{tmp_path}/new.db", at=EVENTS + 1)

    assert parts(tmp_path, "new.db") == parts(tmp_path, ".new.db") == []


# Forks.


@pytest.mark.parametrize("source", ["app.db", "app.zbus"])
def test_a_fork_is_another_log_without_cursors(log: Path, tmp_path: Path, source: str) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    was = SqliteLog(str(log))
    ids = {each.id for each in was.lineage.incarnations}
    log_id = was.log_id
    was.close(5.0)

    made = fork(f"{tmp_path}/{source}", f"{tmp_path}/try.db", at=6_000)

    found = everything(tmp_path / "try.db")
    assert (made.cut, found["head"], found["cursors"], found["positions"]) == (6_000, 6_000, [], {})
    assert found["events"] == everything(log)["events"][:6_000]
    opened = SqliteLog(f"{tmp_path}/try.db")
    try:
        assert opened.log_id == made.log_id != log_id
        assert not ids & {each.id for each in opened.lineage.incarnations}
        assert fill(opened, 10) == 6_010
    finally:
        opened.close(5.0)
    assert verify(f"{tmp_path}/try.db").problems == []


async def test_a_fork_cannot_be_opened_with_a_transport_until_it_is_promoted(log: Path, tmp_path: Path) -> None:
    fork(str(log), f"{tmp_path}/try.db", at=100)
    settings = {"mode": "peer", "listen": ["tcp/127.0.0.1:0"]}

    async with zbus.open(f"{tmp_path}/try.db") as bus:  # embedded
        seen = [event.offset async for event in bus.replay("**")]
        with pytest.raises(ConfigInvalid, match="is a fork"):
            await bus.switch_transport(f"zmq://?registry={tmp_path}/registry", overlap_s=0)
    with pytest.raises(ConfigInvalid, match=r"is a fork.*zbus log promote"):
        async with zbus.open(f"{tmp_path}/try.db", **settings):
            pass
    with pytest.raises(ConfigInvalid, match="is a fork"):  # not `TransportError` after a timeout
        async with zbus.open(f"{tmp_path}/try.db", transport="nats://127.0.0.1:1"):
            pass
    await asyncio.to_thread(promote, f"{tmp_path}/try.db")
    async with zbus.open(f"{tmp_path}/try.db", **settings) as bus:
        assert await bus.head() == 100
    with pytest.raises(ConfigInvalid, match="is not a fork"):
        promote(f"{tmp_path}/try.db")

    assert seen == list(range(1, 101))


def test_a_fork_of_a_log_in_use_leaves_it_alone(log: Path, tmp_path: Path) -> None:
    opened = SqliteLog(str(log))
    try:
        fork(str(log), f"{tmp_path}/try.db")
        assert fill(opened, 5) == EVENTS + 5
        with pytest.raises(ConfigInvalid, match="exists already"):
            fork(str(log), f"{tmp_path}/try.db")
    finally:
        opened.close(5.0)
    assert everything(tmp_path / "try.db")["head"] == EVENTS


def test_a_cursor_of_a_log_is_not_valid_in_its_fork(log: Path, tmp_path: Path) -> None:
    fork(str(log), f"{tmp_path}/try.db", at=8_500)
    Path(f"{tmp_path}/try.db-cursors").write_bytes(Path(f"{log}-cursors").read_bytes())
    opened = SqliteLog(f"{tmp_path}/try.db")
    try:
        with pytest.raises(CursorError, match="from another log"):
            opened.cursors.claim("billing", ["shop/**"], 0)
    finally:
        opened.close(5.0)


# The cold tier.


@pytest.fixture
def tiered(log: Path) -> Path:
    """A log whose first 6,000 events are only in its cold tier."""
    offload(log, 3_000, 6_000).close()
    opened = SqliteLog(str(log))
    opened.prune(Rules(until=6_000, ignore_cursors=True, offloaded=True))
    opened.close(10.0)
    return log


def test_a_backup_in_a_folder_includes_the_cold_tier(tiered: Path, tmp_path: Path) -> None:
    make_backup(str(tiered), f"{tmp_path}/kept/")
    opened = SqliteLog(str(tiered))
    fill(opened, 1_000)
    opened.close(10.0)
    offload(tiered, 8_000).close()

    made = make_backup(str(tiered), f"{tmp_path}/kept/")
    restore(f"{tmp_path}/kept", f"{tmp_path}/again.db")

    assert (made.path, made.cut) == (f"{tmp_path}/kept", EVENTS + 1_000)
    assert verify_backup(f"{tmp_path}/kept").problems == []
    again = everything(tmp_path / "again.db")
    assert (again["low_water"], len(again["events"])) == (0, EVENTS + 1_000)
    assert again == everything(tiered)


def test_a_backup_in_one_file_has_no_place_for_a_cold_tier(tiered: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="end the target with a slash"):
        make_backup(str(tiered), f"{tmp_path}/app.zbus")
    assert not (tmp_path / "app.zbus").exists()


def test_a_missing_file_of_the_cold_tier_is_reported(tiered: Path, tmp_path: Path) -> None:
    make_backup(str(tiered), f"{tmp_path}/kept/")
    gone = next((tmp_path / "kept" / "log.db-cold").rglob("*.parquet"))
    gone.unlink()

    assert any(str(gone) in problem for problem in verify_backup(f"{tmp_path}/kept").problems)


def test_no_backup_or_fork_is_made_without_the_events_of_a_tier_that_was_moved_away(
    tiered: Path, tmp_path: Path
) -> None:
    Path(f"{tiered}-cold").rename(tmp_path / "elsewhere")
    copies: dict[str, Callable[[], object]] = {
        "app.zbus": lambda: make_backup(str(tiered), f"{tmp_path}/app.zbus"),
        "kept/log.db": lambda: make_backup(str(tiered), f"{tmp_path}/kept/"),
        "try.db": lambda: fork(str(tiered), f"{tmp_path}/try.db"),
        "earlier.db": lambda: fork(str(tiered), f"{tmp_path}/earlier.db", at=7_000),
    }

    for name, make in copies.items():
        with pytest.raises(ColdDamaged, match=r"up to offset 6000 were moved to it.*--cold") as caught:
            make()
        assert f"{tiered}-cold" in str(caught.value)
        assert not (tmp_path / name).exists()

    assert make_backup(str(tiered), f"{tmp_path}/kept/", cold=f"{tmp_path}/elsewhere").cut == EVENTS
    assert fork(str(tiered), f"{tmp_path}/try.db", cold=f"{tmp_path}/elsewhere").cut == EVENTS
    assert len(everything(tmp_path / "try.db")["events"]) == EVENTS


def test_an_increment_keeps_the_earlier_backup_if_the_tier_was_moved_away(tiered: Path, tmp_path: Path) -> None:
    make_backup(str(tiered), f"{tmp_path}/kept/")
    Path(f"{tiered}-cold").rename(tmp_path / "elsewhere")
    opened = SqliteLog(str(tiered))
    fill(opened, 100)
    opened.close(10.0)

    with pytest.raises(ColdDamaged, match="the cold tier is missing"):
        make_backup(str(tiered), f"{tmp_path}/kept/")

    restore(f"{tmp_path}/kept", f"{tmp_path}/again.db")
    assert len(everything(tmp_path / "again.db")["events"]) == EVENTS


def test_a_log_continues_to_be_backed_up_after_the_loss_of_its_tier_was_accepted(tiered: Path, tmp_path: Path) -> None:
    shutil.rmtree(f"{tiered}-cold")
    SqliteLog(str(tiered), accept_loss=True).close(10.0)

    assert make_backup(str(tiered), f"{tmp_path}/app.zbus").cut == EVENTS


def test_a_backup_without_its_files_of_the_tier_is_not_restored_or_forked(tiered: Path, tmp_path: Path) -> None:
    make_backup(str(tiered), f"{tmp_path}/kept/")
    shutil.rmtree(tmp_path / "kept" / "log.db-cold")

    for make in (restore, fork):
        with pytest.raises(LogError, match="is missing, but belongs to the cold tier"):
            make(f"{tmp_path}/kept", f"{tmp_path}/again.db")

    assert parts(tmp_path, "again") == []


@pytest.mark.parametrize("source", ["app.db", "kept"])
def test_a_fork_reads_the_cold_tier_as_its_own(tiered: Path, tmp_path: Path, source: str) -> None:
    make_backup(str(tiered), f"{tmp_path}/kept/")

    fork(f"{tmp_path}/{source}", f"{tmp_path}/try.db", at=7_000)

    assert everything(tmp_path / "try.db")["events"] == everything(tiered)["events"][:7_000]
    shutil.rmtree(f"{tiered}-cold")
    assert len(everything(tmp_path / "try.db")["events"]) == 7_000


def test_a_segment_of_the_cold_tier_is_not_divided(log: Path, tmp_path: Path) -> None:
    offload(log, 8_000).close()
    opened = SqliteLog(str(log))
    opened.prune(Rules(until=2_000))
    opened.close(10.0)

    with pytest.raises(ConfigInvalid, match="choose an offset from 8000 on"):
        fork(str(log), f"{tmp_path}/try.db", at=5_000)
    assert fork(str(log), f"{tmp_path}/try.db", at=8_000).cut == 8_000


def test_a_copy_up_to_an_offset_has_the_tables_of_a_log_that_ends_there(log: Path, tmp_path: Path) -> None:
    make_log(tmp_path / "short.db", 5_000)

    LogCopy(str(log), str(tmp_path / "copy.db")).rows(until=5_000)

    found, wanted = tables(tmp_path / "copy.db"), tables(tmp_path / "short.db")
    for name in ("events", "keys", "blocks", "by_key", "runs", "publishers", "losses"):
        assert found[name] == wanted[name], name


# What is not replaced.


def test_a_folder_is_not_replaced_by_a_log(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "other.db").write_bytes(b"of another program")
    before = sorted(tmp_path.iterdir())

    for name in ("data", "data/", "newfolder/"):
        for replace in (False, True):
            with pytest.raises(ConfigInvalid, match=r"a log is a file: name it, such as .*app\.db"):
                restore(f"{tmp_path}/app.zbus", f"{tmp_path}/{name}", replace=replace)
        with pytest.raises(ConfigInvalid, match="a log is a file"):
            fork(str(log), f"{tmp_path}/{name}")

    assert sorted(tmp_path.iterdir()) == before
    assert parts(tmp_path / "data", "") == ["other.db"]


@pytest.mark.parametrize(("source", "target"), [("app.zbus", "app.zbus"), ("kept", "kept/log.db")])
def test_a_backup_is_not_replaced_by_its_own_restore(log: Path, tmp_path: Path, source: str, target: str) -> None:
    for place in ("app.zbus", "kept/"):
        make_backup(str(log), f"{tmp_path}/{place}")

    with pytest.raises(ConfigInvalid, match="is the backup itself"):
        restore(f"{tmp_path}/{source}", f"{tmp_path}/{target}", replace=True)

    assert verify_backup(f"{tmp_path}/{source}").problems == []


def test_an_empty_path_is_not_the_current_folder(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    for call in (
        lambda: make_backup(str(log), ""),
        lambda: restore("", f"{tmp_path}/new.db"),
        lambda: restore(f"{tmp_path}/app.zbus", ""),
        lambda: restore(f"{tmp_path}/app.zbus", "", replace=True),
        lambda: fork(str(log), ""),
        lambda: fork("", f"{tmp_path}/new.db"),
        lambda: verify_backup(""),
    ):
        with pytest.raises(ConfigInvalid, match="the path is empty"):
            call()

    assert list((tmp_path / "here").iterdir()) == parts(tmp_path, "new.db") == []


def test_a_time_before_the_events_that_retention_left_is_refused(log: Path, tmp_path: Path) -> None:
    opened = SqliteLog(str(log))
    opened.prune(Rules(until=6_000, ignore_cursors=True))
    low_water = opened.low_water()
    opened.close(10.0)
    make_backup(str(log), f"{tmp_path}/app.zbus")

    def time_of(offset: int) -> datetime:
        return datetime.fromtimestamp((START_NS + offset * STEP_NS) // 10**9, UTC)

    for offset in (1_000, low_water):
        for call in (restore, fork):
            with pytest.raises(ConfigInvalid, match=rf"has the offsets {low_water + 1} to 9000.*were removed"):
                call(f"{tmp_path}/app.zbus", f"{tmp_path}/new.db", at=time_of(offset))
    assert parts(tmp_path, "new.db") == []
    assert restore(f"{tmp_path}/app.zbus", f"{tmp_path}/new.db", at=time_of(low_water + 1)).cut == low_water + 1
    assert restore(f"{tmp_path}/app.zbus", f"{tmp_path}/all.db", at=time_of(20_000)).cut == EVENTS


def test_a_log_whose_durable_subscriber_is_running_is_not_replaced(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    reader = SqliteLog(str(log), read_only=True)
    try:
        lease = reader.cursors.claim("billing", ["shop/**"], 0)
        with pytest.raises(CursorError, match=rf"'billing': process {os.getpid()} reads .*app\.db; stop that process"):
            restore(f"{tmp_path}/app.zbus", str(log), replace=True)
        assert parts(tmp_path, "app.db.replaced") == parts(tmp_path, ".app") == []
        reader.cursors.release("billing", lease.token)
        assert restore(f"{tmp_path}/app.zbus", str(log), replace=True).replaced is not None
    finally:
        reader.close(5.0)


async def test_a_subscription_learns_that_the_log_was_replaced(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    async with zbus.open(log, read_only=True) as bus, bus.subscribe("shop/**", start=EVENTS) as subscriber:
        assert (await anext(subscriber)).offset == EVENTS

        await asyncio.to_thread(restore, f"{tmp_path}/app.zbus", str(log), replace=True)

        async with asyncio.timeout(10):
            with pytest.raises(LogDamaged, match=r"another file took the place of the log.*Open the log again"):
                await anext(subscriber)


_READ = """
import os, sys
from zbus_log import SqliteLog
if os.getuid() == 0:
    os.setuid(65534)  # whom the folder does not belong to
log = SqliteLog(sys.argv[1], read_only=True)
print(log.head(), [each.offset for each in log.cursors.list()], log.positions.load())
log.close(5.0)
"""


def test_a_restored_log_can_be_read_in_a_folder_that_is_read_only(tmp_path: Path) -> None:
    make_log(tmp_path / "app.db", 10, durable=5)
    make_backup(f"{tmp_path}/app.db", f"{tmp_path}/app.zbus")
    with tempfile.TemporaryDirectory() as place:  # which other users can enter
        restore(f"{tmp_path}/app.zbus", f"{place}/again.db")
        for path in Path(place).iterdir():
            path.chmod(0o444)
        Path(place).chmod(0o555)

        done = subprocess.run([sys.executable, "-c", _READ, f"{place}/again.db"], capture_output=True, text=True)

        Path(place).chmod(0o755)
    assert done.stdout == "10 [5] {'0000000000000abc': 12}\n", done.stderr
