"""Backups, restored logs and forks of a log from whose middle events were removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from log_support import append, opened, raw, wait_until
from removed_support import check, fill, kept, offsets

from zbus.errors import LogDamaged
from zbus.keys import KeySet
from zbus.ports.log import Row
from zbus_log import Rules, SqliteLog
from zbus_log.backup import log_copy
from zbus_log.backup.check import verify_backup
from zbus_log.backup.fork import fork
from zbus_log.backup.log_copy import LogCopy
from zbus_log.backup.make import make_backup
from zbus_log.backup.restore import restore
from zbus_log.file.tables import BLOCK

TELEMETRY = KeySet(["telemetry/**"])
SIZE = 2 * BLOCK + 500


def is_left(key: str) -> bool:
    return key not in TELEMETRY


GONE = SIZE - len(kept(SIZE, is_left))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    with opened(path) as log:
        fill(log, SIZE)
        log.purge(TELEMETRY)
    return path


def read(path: Path | str) -> list[int]:
    with opened(path, read_only=True) as log:
        return offsets(log)


@pytest.mark.parametrize("in_rows", [False, True])
def test_a_restored_backup_has_the_same_events_removed(
    log: Path, tmp_path: Path, in_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_rows:
        monkeypatch.setattr(LogCopy, "whole", lambda self, bytes_max=None: self.rows())
    made = make_backup(str(log), f"{tmp_path}/app.zbus")
    restore(f"{tmp_path}/app.zbus", f"{tmp_path}/again.db")

    with opened(log, read_only=True) as source:
        assert made.digest == source.digest(SIZE) != b""
    assert made.cut == SIZE
    assert read(tmp_path / "again.db") == kept(SIZE, is_left)
    check(tmp_path / "again.db", GONE)
    found = verify_backup(f"{tmp_path}/app.zbus")
    assert (found.problems, found.removed) == ([], GONE)


def test_an_increment_after_a_purge_is_a_full_copy(log: Path, tmp_path: Path) -> None:
    target = f"{tmp_path}/app.zbus"
    first = make_backup(str(log), target)
    with opened(log) as opened_log:
        fill(opened_log, 100)
    second = make_backup(str(log), target)
    with opened(log) as opened_log:
        opened_log.purge(KeySet(["audit/**"]))
    third = make_backup(str(log), target)
    restore(target, f"{tmp_path}/again.db")

    assert (first.added, second.added, third.added) == (SIZE - GONE, 100, len(read(log)))
    assert read(tmp_path / "again.db") == read(log)
    found = verify_backup(target)
    assert found.problems == []
    assert found.removed == SIZE + 100 - len(read(log))
    assert raw(target).execute("SELECT count(*) FROM purges").fetchone() == (2,)


def test_an_increment_adds_to_a_backup_that_has_the_same_events_removed(log: Path, tmp_path: Path) -> None:
    target = f"{tmp_path}/app.zbus"
    make_backup(str(log), target)
    with opened(log) as opened_log:
        fill(opened_log, BLOCK)
        digest = opened_log.digest(SIZE + BLOCK)

    made = make_backup(str(log), target)

    assert (made.added, made.digest) == (BLOCK, digest)
    assert verify_backup(target).problems == []


def outside_of_transactions(monkeypatch: pytest.MonkeyPatch, copy: LogCopy, do: Callable[[], None]) -> None:
    """Do something once, between two steps of a copy."""
    monkeypatch.setattr(log_copy, "STEP_EVENTS", 500)
    monkeypatch.setattr(log_copy, "STEP_S", 0.0001)
    left = [do]
    monkeypatch.setattr(copy, "_progress", lambda done, total: left.pop()() if left and done > 1000 else None)


def test_a_purge_during_a_copy_is_in_the_copy_too(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(log) as owner:
        copy = LogCopy(str(log), f"{tmp_path}/copy.db")
        outside_of_transactions(monkeypatch, copy, lambda: owner.purge(KeySet(["audit/**"])) and None)
        found = copy.rows()

        assert found.digest == owner.digest(SIZE)
        assert offsets(owner) == kept(SIZE, lambda key: key.startswith("shop"))
    again = SqliteLog(f"{tmp_path}/copy.db", accept_loss=True)  # a copy has no head record
    again.close(5.0)
    assert read(tmp_path / "copy.db") == read(log)
    check(tmp_path / "copy.db", SIZE - len(read(log)))


def test_a_purge_and_retention_during_a_copy_make_it_begin_anew(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(log) as owner:

        def both() -> None:
            owner.purge(KeySet(["audit/**"]))
            owner.prune(Rules(until=100))

        copy = LogCopy(str(log), f"{tmp_path}/copy.db")
        outside_of_transactions(monkeypatch, copy, both)
        found = copy.rows()

        assert (found.low_water, found.digest) == (100, owner.digest(SIZE))


@pytest.mark.parametrize("at", [1, 5, 6, BLOCK - 1, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 5, SIZE])
def test_a_fork_at_any_offset_has_what_was_left_up_to_it(log: Path, tmp_path: Path, at: int) -> None:
    made = fork(str(log), f"{tmp_path}/try.db", at=at)

    assert made.cut == at
    with opened(tmp_path / "try.db") as forked, opened(log, read_only=True) as source:
        assert forked.digest(at) == source.digest(at)
        wait_until(lambda: forked._owner.chain)  # from then on, the digest of the head is in memory
        assert (forked.head(), forked.digest(at)) == (at, source.digest(at))
        assert offsets(forked) == kept(at, is_left)
        assert append(forked, [Row(1, 1, 1, "x", b"", None)]) == [at + 1]
    check(tmp_path / "try.db", at - len(kept(at, is_left)))


def test_a_backup_of_other_removals_of_the_same_number_is_made_anew(tmp_path: Path) -> None:
    path, first, second = tmp_path / "app.db", f"{tmp_path}/first.zbus", f"{tmp_path}/second.zbus"
    with opened(path) as log:
        fill(log, SIZE)
        make_backup(str(path), first)
        log.purge(TELEMETRY)
        make_backup(str(path), second)
    restore(first, str(path), replace=True)
    with opened(path) as log:
        log.purge(KeySet(["shop/**"]))
        left = offsets(log)

    make_backup(str(path), second)
    restore(second, f"{tmp_path}/again.db")

    assert verify_backup(second).problems == []
    assert read(tmp_path / "again.db") == left != kept(SIZE, is_left)


def test_a_damaged_event_of_a_backup_is_an_error_that_says_so(log: Path, tmp_path: Path) -> None:
    make_backup(str(log), f"{tmp_path}/app.zbus")
    connection = raw(log)
    connection.execute("DROP TRIGGER events_are_not_updated")
    connection.execute("UPDATE events SET checksum = -1 WHERE offset = (SELECT max(offset) FROM events)")
    connection.close()

    with pytest.raises(LogDamaged, match="malformed"):
        make_backup(str(log), f"{tmp_path}/other.zbus")
