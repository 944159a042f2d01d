"""Cursors and the lineage of their log: a position that is not in the log any more is refused, not used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_processes import Commands
from log_support import append, opened, raw
from mesh_fakes import recorded

import zbus
from zbus.errors import CursorError
from zbus.ports.log import Row
from zbus_log import Pruned, Rules, SqliteLog
from zbus_log.file import incarnations

OLD = Path(__file__).parents[1] / "data" / "v1" / "log.db"  # of version 0.1

call = Commands()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    call.close()


def row(sequence: int) -> Row:
    return Row(1, sequence, sequence, "a/b", b"payload-%d" % sequence, None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def old(path: Path) -> Path:
    """A log that version 0.1 wrote."""
    for suffix in ("", "-head", "-cursors"):
        shutil.copyfile(f"{OLD}{suffix}", f"{path}{suffix}")
    return path


def claimed(log: SqliteLog, name: str, upto: int) -> None:
    """A durable subscription that acknowledged everything up to an offset."""
    lease = log.cursors.claim(name, ["**"], 0)
    log.cursors.advance(name, lease.token, upto)
    log.cursors.release(name, lease.token)


def files(path: Path, to: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        shutil.copyfile(f"{path}{suffix}", f"{to}{suffix}")


@pytest.fixture
def restored(path: Path) -> Path:
    """A log that was restored to offset 100 after its cursors had gone on: 'ahead' to 160, 'behind' to 80."""
    with opened(path) as log:
        append(log, [row(n) for n in range(100)])
    files(path, path.with_name("backup"), "", "-head")
    with opened(path) as log:
        append(log, [row(n) for n in range(100, 160)])
        claimed(log, "ahead", 160)
        claimed(log, "behind", 80)
    files(path.with_name("backup"), path, "", "-head")
    return path


def refused(log: SqliteLog, name: str, says: str) -> None:
    """Twice, and no position was changed: a claim that fails leaves no lease."""
    before = log.cursors.list()
    for _ in range(2):
        with pytest.raises(CursorError, match=says) as caught:
            log.cursors.claim(name, ["**"], 0)
        assert f"zbus log cursors {log.path} --reset {name} --to " in str(caught.value)
    assert log.cursors.list() == before


def test_a_cursor_beyond_the_end_of_a_restored_log_is_refused(restored: Path) -> None:
    for read_only in (True, False):
        with opened(restored, read_only=read_only) as log:
            refused(log, "ahead", "160, is after the end of the log, 100")


@pytest.mark.parametrize("read_only", [False, True], ids=["owner", "reader"])
def test_a_cursor_from_events_that_a_restore_lost_is_refused_once_there_are_others(
    restored: Path, read_only: bool
) -> None:
    with opened(restored) as owner:
        append(owner, [row(n) for n in range(1000, 1100)])
        with opened(restored, read_only=True) as reader:
            log = reader if read_only else owner
            refused(log, "ahead", "160, is from another log, or from events that were lost")
            assert log.cursors.claim("behind", ["**"], 0).offset == 80


def test_a_cursor_that_went_on_in_the_same_incarnation_is_refused_after_a_restore(path: Path) -> None:
    """The copy was taken while the log was open, so it has the incarnation of the events that it lacks."""
    with opened(path) as log:
        append(log, [row(n) for n in range(100)])
        files(path, path.with_name("backup"), "", "-wal", "-head")
        append(log, [row(n) for n in range(100, 160)])
        claimed(log, "ahead", 160)
        claimed(log, "behind", 100)
    files(path.with_name("backup"), path, "", "-wal", "-head")

    with opened(path) as log:
        append(log, [row(n) for n in range(1000, 1100)])
        refused(log, "ahead", "160, is from events that were lost when the log was restored to offset 100")
        assert log.cursors.claim("behind", ["**"], 0).offset == 100


def test_a_cursor_of_a_log_that_was_created_anew_is_refused(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(n) for n in range(100)])
        claimed(log, "old", 100)
        claimed(log, "at-the-beginning", 0)
    for suffix in ("", "-head"):
        Path(f"{path}{suffix}").unlink()

    with opened(path) as log:
        append(log, [row(n) for n in range(1000, 1120)])
        refused(log, "old", "100, is from another log")
        assert log.cursors.claim("at-the-beginning", ["**"], 0).offset == 0


def test_a_reset_makes_a_cursor_usable_again_for_good(restored: Path) -> None:
    with opened(restored) as log:
        append(log, [row(n) for n in range(1000, 1100)])
        log.cursors.reset("ahead", 150)
        lease = log.cursors.claim("ahead", ["**"], 0)
        current = log.lineage.current.id
        assert lease.offset == 150
        assert {each.name: each.incarnation for each in log.cursors.list()}["ahead"] == current
        log.cursors.advance("ahead", lease.token, 155)
        log.cursors.release("ahead", lease.token)

    with opened(restored) as log:
        assert log.cursors.claim("ahead", ["**"], 0).offset == 155


def test_a_position_has_the_incarnation_that_stored_its_event(path: Path) -> None:
    ids = []
    for number in range(3):
        with opened(path) as log:
            append(log, [row(number * 10 + n) for n in range(10)])
            ids.append(log.lineage.current.id)
    with opened(path) as owner, opened(path, read_only=True) as reader:
        for log in (owner, reader):
            for offset, wanted in ((1, ids[0]), (10, ids[0]), (11, ids[1]), (30, ids[2])):
                name = f"at-{offset}-{log.read_only}"
                claimed(log, name, offset)
                assert {each.name: each.incarnation for each in log.cursors.list()}[name] == wanted


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_cursor_at_an_offset_whose_loss_was_accepted_gets_the_events_after_the_loss(
    path: Path, durability: str
) -> None:
    with opened(path, durability=durability) as log:
        append(log, [row(n) for n in range(100)])
    files(path, path.with_name("backup"), "")
    with opened(path, durability=durability) as log:
        append(log, [row(n) for n in range(100, 160)])
        claimed(log, "ahead", 160)
    files(path.with_name("backup"), path, "")

    with opened(path, accept_loss=True) as log:
        before = log.cursors.claim("ahead", ["**"], 0)
        log.cursors.release("ahead", before.token)
        (next_,) = append(log, [row(1000)])
        assert before.offset == log.cursors.claim("ahead", ["**"], 0).offset == 160
        assert next_ > 160
        assert log.cursors.lowest() == log.cursors.list()[0]._replace(owner=None)


def test_a_cursor_survives_the_loss_of_an_incarnation_that_stored_nothing(path: Path) -> None:
    """A power cut can take it, because only the first event syncs it; the cursor was synced."""
    with opened(path) as log:
        append(log, [row(n) for n in range(10)])
    files(path, path.with_name("backup"), "", "-head")
    with opened(path) as log:
        claimed(log, "worker", 10)
    files(path.with_name("backup"), path, "", "-head")

    with opened(path) as log:
        assert log.cursors.claim("worker", ["**"], 0).offset == 10


def test_a_position_of_version_0_1_is_compared_with_the_end_of_that_version_s_events(old: Path) -> None:
    with opened(old) as log:
        head = log.head()
        names = [each.name for each in log.cursors.list()]
        assert names
        assert {each.incarnation for each in log.cursors.list()} == {0}
        append(log, [row((1 << 40) + n) for n in range(100)])
        for name in names:
            log.cursors.release(name, log.cursors.claim(name, ["**"], 0).token)
    connection = raw(f"{old}-cursors")
    connection.execute(
        "UPDATE cursors SET incarnation = NULL, checksum = NULL, offset = ? WHERE name = ?", (head + 5, names[0])
    )
    connection.close()

    with opened(old) as log:
        refused(log, names[0], f"{head + 5}, is from events that were lost")


def test_a_position_of_version_0_1_beside_a_log_that_it_never_opened_is_refused(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(n) for n in range(10)])
        claimed(log, "worker", 10)
    connection = raw(f"{path}-cursors")
    connection.execute("UPDATE cursors SET incarnation = NULL, checksum = NULL")
    with opened(path) as log:
        refused(log, "worker", "10, is from another log")
        connection.execute("UPDATE cursors SET offset = 11, checksum = NULL")
        refused(log, "worker", "11, is after the end of the log, 10")
    for note in Path(f"{path}-leases").iterdir():  # version 0.1 stored none
        note.write_bytes(b"")
    connection.execute("UPDATE cursors SET offset = 0, checksum = NULL")
    with opened(path) as log:
        log.cursors.release("worker", log.cursors.claim("worker", ["**"], 0).token)
    connection.close()


def test_a_position_of_an_incarnation_that_was_forgotten_is_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as log:
        append(log, [row(n) for n in range(10)])
        claimed(log, "worker", 10)
        append(log, [row(10)])
    monkeypatch.setattr(incarnations, "KEPT_MAX", 3)
    monkeypatch.setattr("zbus_log.write.cursors.KEPT_MAX", 3)
    for number in range(4):
        with opened(path) as log:
            append(log, [row(11 + number)])

    with opened(path) as log:
        assert log.cursors.claim("worker", ["**"], 0).offset == 10


def test_a_cursor_that_shares_nothing_with_its_log_does_not_hold_back_retention_and_is_reported_once(
    restored: Path,
) -> None:
    with opened(restored) as log, recorded() as records:
        append(log, [row(n) for n in range(1000, 1100)])
        log.cursors.delete("behind")
        assert log.prune(Rules(until=180)) == Pruned(180, 180, None)
        assert log.prune(Rules(until=190)) == Pruned(190, 10, None)

    found = [each for each in records if each["record"] == "LOG_CURSOR_UNUSABLE"]
    assert [(each["durable"], each["code"]) for each in found] == [("ahead", "cursor_unusable")]
    assert "--reset ahead" in str(found[0]["reason"])


def test_retention_keeps_the_events_after_those_that_an_unusable_cursor_shares(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(n) for n in range(100)])
        files(path, path.with_name("backup"), "", "-wal", "-head")
        append(log, [row(n) for n in range(100, 160)])
        claimed(log, "ahead", 160)
    files(path.with_name("backup"), path, "", "-wal", "-head")

    with opened(path) as log:
        append(log, [row(n) for n in range(1000, 1100)])
        assert log.prune(Rules(until=190)) == Pruned(100, 100, "ahead")


async def test_a_durable_subscription_of_a_restored_log_raises_and_goes_on_after_a_reset(restored: Path) -> None:
    async with zbus.open(restored) as bus:
        publisher = await bus.publisher("a/b")
        await publisher.publish_many([b"new"] * 100)
        with pytest.raises(CursorError, match="--reset ahead --to"):
            async with bus.subscribe("a/**", durable="ahead") as subscription:
                await subscription.next()
    assert "cannot be used" in call("log", "cursors", restored).stdout.decode()
    assert call("log", "cursors", restored, "--reset", "ahead", "--to", "100", "--yes").returncode == 0
    async with zbus.open(restored) as bus, bus.subscribe("a/**", durable="ahead") as subscription:
        received = [await subscription.next() for _ in range(100)]
        assert [event.offset for event in received if event] == list(range(101, 201))


def test_the_command_line_shows_the_incarnation_and_cursors_that_cannot_be_used(restored: Path) -> None:
    with opened(restored) as log:
        append(log, [row(n) for n in range(1000, 1100)])
        current = log.lineage.current

    stats = json.loads(call("log", "stats", restored, "--json").stdout)
    listed = call("log", "cursors", restored, "--json").stdout.splitlines()
    shown = call("log", "stats", restored).stdout.decode()

    assert (stats["incarnation"], stats["incarnation_first"], stats["incarnations"]) == (f"{current.id:x}", 101, 2)
    assert f"{current.id:x}" in shown
    problems = {each["name"]: each["problem"] for each in map(json.loads, listed)}
    assert problems["behind"] is None
    assert "lost" in problems["ahead"]
    assert {each["name"]: each["problem"] for each in stats["cursors"]} == problems
