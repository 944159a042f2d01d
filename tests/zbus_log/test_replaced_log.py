"""A log whose file was replaced by a copy that continued with other events, while its head record stayed.

The copy can be longer than the log was, so the length does not show the loss; the incarnations do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from backup_support import fill, make_log

from zbus.errors import LogDamaged
from zbus_log import SqliteLog, verify
from zbus_log.file.head_record import HeadRecord
from zbus_log.write.writer import Writer

REPLACED = "replaced by a copy of this log, which continued with other events"
SIDES = ("", "-wal", "-head")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "app.db"
    make_log(made, 10)
    return made


@pytest.fixture
def clone(path: Path, tmp_path: Path) -> Path:
    """A copy of the log with its first 10 events."""
    return copy(path, tmp_path / "clone.db")


@contextmanager
def opened(path: Path, **options: bool) -> Iterator[SqliteLog]:
    log = SqliteLog(str(path), **options)  # type: ignore[arg-type]
    try:
        yield log
    finally:
        log.close(10.0)


def copy(path: Path, to: Path) -> Path:
    for side in SIDES:
        if Path(f"{path}{side}").exists():
            shutil.copyfile(f"{path}{side}", f"{to}{side}")
    return to


def add(path: Path, count: int) -> None:
    with opened(path) as log:
        fill(log, count)


def assert_refused(path: Path, missing: tuple[int, int] | None) -> None:
    """A reader and an owner refuse the log, and change nothing."""
    for read_only in (True, False, True):
        with pytest.raises(LogDamaged, match=REPLACED) as caught:
            SqliteLog(str(path), read_only=read_only)
        assert caught.value.missing == missing
    assert any(REPLACED in problem for problem in verify(str(path)).problems)


@pytest.mark.parametrize("others", [40, 100], ids=["as long", "longer"])
def test_a_log_that_was_replaced_by_a_clone_is_refused(path: Path, clone: Path, others: int) -> None:
    add(path, 40)
    add(clone, others)
    shutil.copyfile(clone, path)

    assert_refused(path, None)


def test_a_clone_that_was_made_during_an_opening_shares_it_only_up_to_the_copy(path: Path, tmp_path: Path) -> None:
    with opened(path) as log:
        fill(log, 5)
        clone = copy(path, tmp_path / "clone.db")
        fill(log, 40)
    add(clone, 100)
    shutil.copyfile(clone, path)

    assert_refused(path, (16, 55))


def test_the_loss_by_a_replaced_file_can_be_accepted(path: Path, clone: Path) -> None:
    add(path, 40)
    add(clone, 100)
    shutil.copyfile(clone, path)

    with opened(path, accept_loss=True) as log:
        assert log.head() == 110
    assert verify(str(path)).problems == []
    with opened(path) as log:
        fill(log, 1)
    with opened(path, read_only=True):
        assert verify(str(path)).problems == []


def test_a_clone_with_its_own_head_record_opens(path: Path, clone: Path) -> None:
    add(path, 40)
    add(clone, 100)
    copy(clone, path)

    with opened(path) as log:
        assert log.head() == 110


def test_openings_without_an_event_leave_a_log_as_it_was(path: Path) -> None:
    for _ in range(3):
        with opened(path) as log, opened(path, read_only=True) as reader:
            assert (log.head(), reader.head()) == (10, 10)
            assert verify(str(path)).problems == []
        assert verify(str(path)).problems == []
    add(path, 1)
    assert verify(str(path)).problems == []


def test_a_reader_and_verify_agree_with_an_owner_that_begins_incarnations(path: Path) -> None:
    with opened(path) as log:
        for head in (10, 11, 12):
            assert log.head() == head
            log.begin_incarnation()
            with opened(path, read_only=True):
                assert verify(str(path)).problems == []
            fill(log, 1)
            with opened(path, read_only=True):
                assert verify(str(path)).problems == []


POINTS: dict[str, tuple[type, str, bool]] = {
    "before the head record of the opening": (HeadRecord, "update", False),
    "after the head record of the opening": (HeadRecord, "record_file", False),
    "before the incarnation": (Writer, "_begin", False),
    "after the incarnation": (Writer, "_begin", True),
    "before the event": (Writer, "_insert", False),
    "after the event": (Writer, "_insert", True),
    "after the head record of the event": (Writer, "_record_head", True),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("events", [0, 10])
def test_a_process_that_is_killed_while_it_opens_a_log_leaves_one_that_opens(
    tmp_path: Path, point: str, events: int
) -> None:
    path = tmp_path / "killed.db"
    make_log(path, events)
    for _ in range(2):
        _die(path, *POINTS[point])
        with opened(path, read_only=True) as reader:
            assert reader.head() >= events
        assert verify(str(path)).problems == []

    add(path, 1)
    with opened(path) as log:
        assert log.head() > events
    assert verify(str(path)).problems == []


def _die(path: Path, owner: type, name: str, after: bool) -> None:
    """Open the log and append an event in a process that ends at a call, without closing anything."""
    child = os.fork()
    if child == 0:
        original: Callable[..., object] = getattr(owner, name)

        def dying(*args: object, **options: object) -> None:
            if after:
                original(*args, **options)
            os._exit(7)

        setattr(owner, name, dying)
        try:
            fill(SqliteLog(str(path)), 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
