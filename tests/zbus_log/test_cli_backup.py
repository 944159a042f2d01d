"""`zbus log backup`, `restore`, `fork` and `promote` from the command line, beside an owner."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from backup_support import everything, fill, make_log
from cli_processes import Commands
from cold_support import offload
from log_support import raw

from zbus_log import Rules, SqliteLog

call = Commands()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    call.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    make_log(path, 300, durable=200)
    return path


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    done = call("log", *arguments, **environment)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_a_backup_beside_the_owner_is_verified_and_continued(log: Path, tmp_path: Path) -> None:
    owner = SqliteLog(str(log))
    try:
        first = run("backup", log, tmp_path / "app.zbus", "--verify")
        fill(owner, 5)
        second = run("backup", log, tmp_path / "app.zbus", "--json")
    finally:
        owner.close(5.0)

    assert first.returncode == 0
    assert "full copy, 300 events; the backup ends with offset 300" in first.stderr
    assert "300 events up to offset 300, no problems" in first.stderr
    assert (first.stdout, second.returncode) == ("", 0)
    made = json.loads(second.stdout)
    assert (made["cut"], made["added"], len(made["digest"])) == (305, 5, 32)
    assert made["is_full"] is False


def test_verification_that_finds_a_problem_exits_with_1(log: Path, tmp_path: Path) -> None:
    assert run("backup", log, tmp_path / "app.zbus").returncode == 0
    connection = raw(tmp_path / "app.zbus")
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.execute("UPDATE events SET sequence = sequence + 1000 WHERE offset = 7")
    connection.close()
    connection = raw(log)  # the triggers are a part of the log that an increment compares
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.close()

    done = run("backup", log, tmp_path / "app.zbus", "--verify")

    assert done.returncode == 1
    assert "7" in done.stdout
    assert "problems found" in done.stderr


def test_a_backup_of_another_log_is_a_usage_error(log: Path, tmp_path: Path) -> None:
    make_log(tmp_path / "other.db", 3)
    run("backup", tmp_path / "other.db", tmp_path / "app.zbus")

    done = run("backup", log, tmp_path / "app.zbus")

    assert done.returncode == 2
    assert "is the backup of another history" in done.stderr
    assert run("backup", tmp_path / "none.db", tmp_path / "x.zbus").returncode == 2
    assert run("restore", tmp_path / "none.zbus", tmp_path / "new.db").returncode == 2


def test_a_restore_says_after_which_offset_events_are_missing(log: Path, tmp_path: Path) -> None:
    run("backup", log, tmp_path / "kept/")

    done = run("restore", tmp_path / "kept", tmp_path / "new.db")

    assert done.returncode == 0
    assert "ends with offset 300" in done.stderr
    assert "events that were stored after that offset are missing here" in done.stderr
    assert everything(tmp_path / "new.db") == everything(log)


def test_a_restore_over_a_log_needs_replace_and_a_confirmation(log: Path, tmp_path: Path) -> None:
    run("backup", log, tmp_path / "app.zbus")
    owner = SqliteLog(str(log))
    fill(owner, 5)
    owner.close(5.0)

    refused = run("restore", tmp_path / "app.zbus", log)
    unconfirmed = run("restore", tmp_path / "app.zbus", log, "--replace")
    assert (refused.returncode, unconfirmed.returncode) == (2, 2)
    assert "--replace moves it aside" in refused.stderr
    assert "give --yes" in unconfirmed.stderr
    assert everything(log)["head"] == 305
    done = run("restore", tmp_path / "app.zbus", log, "--replace", "--yes")

    assert done.returncode == 0
    assert everything(log)["head"] == 300
    assert "its events after 300 are not in" in done.stderr
    (aside,) = tmp_path.glob("app.db.replaced-????????T??????")
    assert everything(aside)["head"] == 305


def test_a_log_in_use_is_not_replaced(log: Path, tmp_path: Path) -> None:
    run("backup", log, tmp_path / "app.zbus")
    owner = SqliteLog(str(log))
    try:
        done = run("restore", tmp_path / "app.zbus", log, "--replace", "--yes")
    finally:
        owner.close(5.0)
    assert done.returncode == 1
    assert "stop it first" in done.stderr


def test_a_fork_by_offset_and_time_and_its_promotion(log: Path, tmp_path: Path) -> None:
    by_offset = run("fork", log, tmp_path / "try.db", "--at", "100", "--json")
    by_time = run("fork", log, tmp_path / "then.db", "--at", "2023-11-14T22:15:00Z")

    assert json.loads(by_offset.stdout)["cut"] == 100
    assert "is a fork of" in by_time.stderr
    assert everything(tmp_path / "then.db")["head"] == 100  # a hundred seconds after the start
    of_log, of_fork = (json.loads(run("stats", each, "--json").stdout) for each in (log, tmp_path / "try.db"))
    assert (of_log["fork"], of_fork["fork"]["of"], of_fork["fork"]["until"]) == (None, of_log["origin"], 100)
    assert "up to offset 100; it sends nothing" in run("stats", tmp_path / "try.db").stdout
    assert run("promote", tmp_path / "try.db").returncode == 2
    assert run("promote", tmp_path / "try.db", "--yes").returncode == 0
    again = run("promote", tmp_path / "try.db", "--yes")
    assert (again.returncode, "is not a fork" in again.stderr) == (2, True)


def test_a_backup_is_verified_by_itself_and_is_not_taken_for_a_log(log: Path, tmp_path: Path) -> None:
    backup = tmp_path / "app.zbus"
    assert run("backup", log, backup).returncode == 0

    verified, opened = run("verify", backup), run("stats", backup)
    accepted = run("verify", backup, "--accept-loss")

    assert verified.returncode == 0
    assert "300 events up to offset 300, no problems" in verified.stderr
    for refused in (opened, accepted):
        assert refused.returncode != 0
        assert "is a backup, not a log" in refused.stderr
        assert "zbus log restore" in refused.stderr
    assert not Path(f"{backup}-head").exists()


def test_a_folder_with_a_backup_is_verified(log: Path, tmp_path: Path) -> None:
    assert run("backup", log, f"{tmp_path}/backups/").returncode == 0
    connection = raw(tmp_path / "backups" / "log.db")
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.execute("UPDATE events SET sequence = sequence + 1000 WHERE offset = 7")
    connection.close()

    found = run("verify", f"{tmp_path}/backups/")

    assert found.returncode == 1
    assert "offset 7" in found.stdout


@pytest.mark.parametrize("by_variable", [True, False])
def test_the_folder_of_a_moved_tier_is_an_option_and_a_variable_of_each_command(
    log: Path, tmp_path: Path, by_variable: bool
) -> None:
    offload(log, 100).close()
    opened = SqliteLog(str(log))
    opened.prune(Rules(until=100, ignore_cursors=True, offloaded=True))
    opened.close(10.0)
    place = tmp_path / "elsewhere"
    Path(f"{log}-cold").rename(place)
    commands = [("verify", log), ("backup", log, f"{tmp_path}/kept/"), ("fork", log, tmp_path / "try.db")]

    refused = [run(*each) for each in commands]
    if by_variable:
        done = [run(*each, ZBUS_COLD_DIR=str(place)) for each in commands]
    else:
        done = [run(*each, "--cold", place) for each in commands]

    assert [each.returncode for each in refused] == [1, 1, 1]
    assert all("--cold" in each.stdout + each.stderr for each in refused)
    assert [each.returncode for each in done] == [0, 0, 0], done


def test_the_variable_of_the_tier_is_not_about_the_tier_of_a_backup(log: Path, tmp_path: Path) -> None:
    offload(log, 100).close()
    assert run("backup", log, f"{tmp_path}/kept/").returncode == 0

    for command in (("fork", tmp_path / "kept", tmp_path / "try.db"), ("verify", tmp_path / "kept")):
        done = run(*command, ZBUS_COLD_DIR="/no/such/tier")
        assert (done.returncode, "/no/such/tier" in done.stderr) == (0, False), done.stderr
