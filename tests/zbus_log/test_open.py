"""Opening: one owner, and a log that is not the one that was acknowledged is never taken for it.

`data/log-v1.db` and its head record were written by version 1, by
`PYTHONPATH=tests/support python tests/zbus_log/test_open.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from log_support import append, offsets_of, opened

from zbus import BusConfig
from zbus.errors import ConfigInvalid, LogDamaged, LogError, LogLocked, ZbusError
from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus_log import open_log
from zbus_log.file import sqlite_driver
from zbus_log.file.database import log_errors, make_engine, transaction
from zbus_log.file.head_record import _SLOT, _SLOTS_AT, owner_pid, read_record
from zbus_log.file.tables import MIGRATIONS, VERSION

EVERYTHING = KeySet(["**"])
DATA = Path(__file__).parents[1] / "data"
GOLDEN: list[Row] = [
    Row(7, 0, 1_700_000_000_000_000_000, "shop/orders/created", b'{"id": 1}', None),
    Row(7, 1, 1_700_000_000_000_000_001, "shop/orders/paid", b"\x00\xff\xfe", msgspec.msgpack.encode({"schema": "v1"})),
    Row(9, 5, 1_700_000_000_000_000_002, "fleet/é", b"x" * 300, None),
    Row(7, 2, 1_700_000_000_000_000_000, "shop/orders/created", b'{"id": 2}', None),
    Row((1 << 53) - 1, 0, (1 << 63) - 1, "audit", b"last", msgspec.msgpack.encode({"content-type": "text/plain"})),
]

OWNER = """
import sys
from queue import SimpleQueue
from zbus import BusConfig
from zbus_log import Row, open_log
log = open_log(BusConfig(log=sys.argv[1]))
answers = SimpleQueue()
log.append([Row(1, n, n, "a/b", b"x") for n in range(10)], answers.put, None)
answers.get()
print("ready", flush=True)
sys.stdin.read()
"""


def row(sequence: int, publisher: int = 1) -> Row:
    return Row(publisher, sequence, sequence, "a/b", b"payload-%d" % sequence, None)


def write(path: Path, start: int, stop: int, **more: Any) -> list[int]:
    """Append events one commit each, and close."""
    with opened(path, **more) as log:
        return [append(log, [row(sequence)])[0] for sequence in range(start, stop)]


def read(path: Path) -> list[int]:
    with opened(path, read_only=True) as log:
        events, error, _ = log.read(EVERYTHING, Span(), 1000).events()
        assert error is None
        return [event.offset for event in events]


def copy(path: Path, to: Path) -> None:
    """Take the files as they are now: of a log that is open, this is what a killed owner leaves."""
    for suffix in ("", "-wal", "-head"):
        if Path(f"{path}{suffix}").exists():
            shutil.copyfile(f"{path}{suffix}", f"{to}{suffix}")


def refused(path: Path, **more: Any) -> LogDamaged:
    """Opening fails, twice in the same way: nothing was changed by the first attempt."""
    errors = []
    for _ in range(2):
        with pytest.raises(LogDamaged) as caught:
            open_log(BusConfig(log=str(path), **more))
        errors.append(caught.value)
    assert (errors[0].reason, errors[0].missing) == (errors[1].reason, errors[1].missing)
    return errors[0]


def assert_goes_on_beyond(path: Path, ever: int) -> None:
    """With accept_loss the log can be used, and no offset up to `ever` is given out, now or after restarts."""
    with opened(path, accept_loss=True) as log:
        assert log.head() <= ever
    first = write(path, 1000, 1003)
    second = write(path, 1003, 1006)
    assert first[0] > ever
    assert first + second == list(range(first[0], first[0] + 6))
    assert read(path)[-6:] == first + second


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the log and has ten events in it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


# Ownership


def test_a_second_process_gets_an_error_that_names_the_owner_of_the_log(
    path: Path, owner: subprocess.Popen[str]
) -> None:
    with pytest.raises(LogLocked) as caught:
        open_log(BusConfig(log=str(path)))

    assert caught.value.pid == owner.pid
    assert str(owner.pid) in str(caught.value)


def test_the_same_process_cannot_own_a_log_twice(path: Path) -> None:
    with opened(path) as log:
        with pytest.raises(LogLocked) as caught:
            open_log(BusConfig(log=str(path)))
        assert caught.value.pid == os.getpid()
        assert append(log, [row(0)]) == [1]

    assert write(path, 1, 2) == [2]


def test_readers_are_welcome_while_the_owner_writes(path: Path) -> None:
    with opened(path) as log, opened(path, read_only=True) as first, opened(path, read_only=True) as second:
        for sequence in range(20):
            append(log, [row(sequence)])
            assert first.head() == second.head() == sequence + 1
        assert len(second.read(EVERYTHING, Span(), 100).events()[0]) == 20


def test_a_reader_in_another_process_than_the_owner_reads(path: Path, owner: subprocess.Popen[str]) -> None:
    assert read(path) == list(range(1, 11))


def test_a_reader_hears_of_a_head_that_moved(path: Path) -> None:
    heads: SimpleQueue[int] = SimpleQueue()
    with opened(path) as log, opened(path, read_only=True) as reader:
        reader.watch(heads.put)
        assert heads.get(timeout=20) == 0
        append(log, [row(0)])
        assert heads.get(timeout=20) == 1


def test_a_log_can_be_owned_at_once_after_its_owner_was_killed(path: Path, owner: subprocess.Popen[str]) -> None:
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(20)

    assert write(path, 10, 12) == [11, 12]
    assert read(path) == list(range(1, 13))


def test_a_log_can_be_owned_at_once_after_its_owner_closed_it(path: Path) -> None:
    for start in range(5):
        assert write(path, start, start + 1) == [start + 1]


def test_looking_for_the_owner_does_not_keep_one_from_opening(path: Path) -> None:
    write(path, 0, 1)
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            owner_pid(str(path))

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(20):
            with opened(path):
                pass
    finally:
        stop.set()
        for looker in lookers:
            looker.join(20)


# The head record: what was acknowledged is known outside of the file


def test_a_log_that_was_closed_or_killed_opens_without_complaint(path: Path, tmp_path: Path) -> None:
    with opened(path) as log:
        for sequence in range(10):
            append(log, [row(sequence)])
        copy(path, tmp_path / "killed.db")

    assert write(path, 10, 11) == [11]
    assert write(tmp_path / "killed.db", 10, 11) == [11]


def test_an_older_copy_put_back_is_noticed(path: Path, tmp_path: Path) -> None:
    write(path, 0, 5)
    shutil.copyfile(path, tmp_path / "backup.db")
    write(path, 5, 12)
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.copyfile(tmp_path / "backup.db", path)

    error = refused(path)

    assert error.missing == (6, 12)
    assert "6 to 12" in str(error)
    assert "accept-loss" in str(error)
    assert_goes_on_beyond(path, 12)


def test_a_log_without_its_end_is_noticed(path: Path, tmp_path: Path) -> None:
    with opened(path) as log:
        for sequence in range(10):
            append(log, [row(sequence)])
        copy(path, tmp_path / "killed.db")
    wal = Path(f"{tmp_path / 'killed.db'}-wal")
    data = bytearray(wal.read_bytes())
    data[data.index(b"payload-6")] ^= 1  # first written by the commit of offset 7
    wal.write_bytes(data)

    assert refused(tmp_path / "killed.db").missing == (7, 10)
    assert_goes_on_beyond(tmp_path / "killed.db", 10)


def test_a_write_ahead_log_that_was_cut_short_is_noticed(path: Path, tmp_path: Path) -> None:
    with opened(path) as log:
        for sequence in range(10):
            append(log, [row(sequence)])
        copy(path, tmp_path / "killed.db")
    wal = Path(f"{tmp_path / 'killed.db'}-wal")
    last = wal.read_bytes().rindex(b"payload-9")  # in the last frame; behind it lie zeros
    os.truncate(wal, last)

    assert refused(tmp_path / "killed.db").missing == (10, 10)
    assert_goes_on_beyond(tmp_path / "killed.db", 10)


def test_another_log_in_its_place_is_noticed(path: Path, tmp_path: Path) -> None:
    write(path, 0, 5)
    write(tmp_path / "other.db", 0, 20)
    shutil.copyfile(tmp_path / "other.db", path)

    error = refused(path)

    assert "a different log" in error.reason
    assert error.missing == (1, 5)
    assert_goes_on_beyond(path, 20)


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_a_log_that_is_gone_is_noticed(path: Path, how: str) -> None:
    write(path, 0, 5)
    path.unlink() if how == "deleted" else os.truncate(path, 0)

    assert refused(path).missing == (1, 5)
    assert_goes_on_beyond(path, 5)


def test_a_log_without_a_head_record_is_not_trusted(path: Path) -> None:
    write(path, 0, 5)
    Path(f"{path}-head").unlink()

    assert "head record" in refused(path).reason
    assert_goes_on_beyond(path, 5)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(lambda data: bytes(range(256)) * 16, id="other bytes"),
        pytest.param(lambda data: b"garbage", id="short"),
        pytest.param(lambda data: data[:100], id="cut short"),
        pytest.param(lambda data: bytes(len(data)), id="zeros"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:64] + b"\xff" * 200 + data[264:], id="both slots torn"),
    ],
)
def test_a_damaged_head_record_is_not_trusted(path: Path, garbage: Callable[[bytes], bytes]) -> None:
    write(path, 0, 5)
    record = Path(f"{path}-head")
    record.write_bytes(garbage(record.read_bytes()))

    assert "head record" in refused(path).reason
    assert_goes_on_beyond(path, 5)


def test_a_torn_slot_of_the_head_record_leaves_the_older_one(path: Path, tmp_path: Path) -> None:
    with opened(path) as log:
        for sequence in range(5):
            append(log, [row(sequence)])
        copy(path, tmp_path / "killed.db")
    path = tmp_path / "killed.db"
    record = Path(f"{path}-head")
    data = bytearray(record.read_bytes())
    newest = max(_SLOTS_AT, key=lambda at: _SLOT.unpack_from(data, at)[3])
    data[newest + 20] ^= 0xFF
    record.write_bytes(data)

    older = read_record(str(path))

    assert older is not None
    assert older.head == 4
    assert write(path, 5, 6) == [6]
    assert read(path) == list(range(1, 7))


def test_events_that_are_missing_in_the_middle_of_the_end_are_noticed(path: Path) -> None:
    write(path, 0, 10)
    connection = sqlite_driver.connect(str(path))
    for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute("DELETE FROM events WHERE offset IN (4, 5)")
    connection.close()

    assert "2 events are missing" in refused(path).reason
    assert_goes_on_beyond(path, 10)


def test_a_loss_that_was_accepted_is_not_reported_again_and_a_second_one_is(path: Path, tmp_path: Path) -> None:
    write(path, 0, 5)
    Path(f"{path}-head").unlink()
    after_loss = write(path, 5, 8, accept_loss=True)
    shutil.copyfile(path, tmp_path / "backup.db")
    more = write(path, 8, 10)
    shutil.copyfile(tmp_path / "backup.db", path)

    assert refused(path).missing == (more[0], more[-1])
    assert_goes_on_beyond(path, more[-1])
    assert read(path)[:8] == [1, 2, 3, 4, 5, *after_loss]


def test_identity_holds_across_an_accepted_loss(path: Path, tmp_path: Path) -> None:
    write(path, 0, 5)
    shutil.copyfile(path, tmp_path / "backup.db")
    write(path, 5, 8)
    shutil.copyfile(tmp_path / "backup.db", path)

    with opened(path, accept_loss=True) as log:
        kept = append(log, [row(sequence) for sequence in range(5)])
        again = append(log, [row(sequence) for sequence in range(5, 8)])

    assert kept == [1, 2, 3, 4, 5]
    assert again[0] > 8


def test_how_far_the_send_queue_was_is_known_after_a_restart(path: Path) -> None:
    with opened(path) as log:
        for sequence in range(10):
            append(log, [row(sequence)])
        assert log.positions.load() == {}
        log.positions.store({"sent/zenoh": 6, "from/3": 1})
        log.positions.store({"sent/zenoh": 7})
    with opened(path) as log:
        assert log.positions.load() == {"sent/zenoh": 7, "from/3": 1}


# Files that are not logs


def test_a_database_of_somebody_else_is_refused_and_left_alone(path: Path) -> None:
    connection = sqlite_driver.connect(str(path))
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = path.read_bytes()

    assert "not a zbus log" in refused(path).reason
    with pytest.raises(LogDamaged):
        open_log(BusConfig(log=str(path), read_only=True))
    assert path.read_bytes() == before


def test_a_refused_file_has_no_new_files_beside_it(path: Path, tmp_path: Path) -> None:
    connection = sqlite_driver.connect(str(path))
    connection.execute("CREATE TABLE mine (x)")
    connection.close()

    refused(path)

    assert [each.name for each in tmp_path.iterdir()] == ["app.db"]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path, read_only: bool) -> None:
    path.write_bytes(b"these are my notes, not a database\n" * 100)

    refused(path, read_only=read_only)

    assert path.read_bytes() == b"these are my notes, not a database\n" * 100


@pytest.mark.parametrize("read_only", [False, True])
def test_a_log_of_a_newer_version_is_refused(path: Path, read_only: bool) -> None:
    write(path, 0, 3)
    connection = sqlite_driver.connect(str(path))
    connection.execute(f"PRAGMA user_version={VERSION + 1}")
    connection.close()

    assert f"version {VERSION + 1}" in refused(path, read_only=read_only).reason


def test_a_folder_that_does_not_exist_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        open_log(BusConfig(log=str(tmp_path / "missing" / "app.db")))

    assert caught.value.field == "log"
    assert "missing" in caught.value.reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("read_only", [False, True])
def test_a_path_that_is_a_folder_is_refused(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "app.db").mkdir()

    with pytest.raises(ZbusError):
        open_log(BusConfig(log=str(tmp_path / "app.db"), read_only=read_only))


def test_reading_a_log_that_does_not_exist_makes_none(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid):
        open_log(BusConfig(log=str(path), read_only=True))

    assert list(tmp_path.iterdir()) == []


def test_a_path_with_special_characters_is_that_path(tmp_path: Path) -> None:
    path = tmp_path / "a ?b#c%20é.db"

    write(path, 0, 3)

    assert path.is_file()
    assert read(path) == [1, 2, 3]


def test_a_log_in_memory_leaves_nothing_behind() -> None:
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    before = set(place.glob("zbus-*"))
    log = open_log(BusConfig(log="memory"))
    folder = Path(log.path).parent

    assert append(log, [row(0), row(1)]) == [1, 2]
    log.cursors.claim("worker", ["**"], 0)
    assert folder.is_dir()
    assert folder not in before
    log.close(5.0)

    assert not folder.exists()


def test_nothing_stays_open_after_close(path: Path) -> None:
    with opened(path):
        pass
    before = sorted(os.listdir("/proc/self/fd"))

    for _ in range(3):
        with opened(path) as log, opened(path, read_only=True) as reader:
            append(log, [row(0)])
            reader.watch(lambda head: None)
            log.cursors.release("worker", log.cursors.claim("worker", ["**"], 0).token)
            reader.read(EVERYTHING, Span(), 10)
    with pytest.raises(LogLocked):
        with opened(path):
            open_log(BusConfig(log=str(path)))

    assert sorted(os.listdir("/proc/self/fd")) == before


# Versions


def schema(path: Path) -> list[tuple[str, str]]:
    connection = sqlite_driver.connect(str(path))
    found = connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name").fetchall()
    connection.close()
    return [(name, " ".join(sql.split())) for name, sql in found]


@pytest.mark.parametrize("version", range(VERSION))
def test_a_log_of_each_older_version_is_brought_to_this_one(path: Path, version: int) -> None:
    path.touch()
    connection = make_engine(str(path)).connect()
    for migration in MIGRATIONS[:version]:
        with transaction(connection):
            migration(connection)
    connection.exec_driver_sql(f"PRAGMA user_version={version}")
    connection.close()

    assert write(path, 0, 3) == [1, 2, 3]
    assert read(path) == [1, 2, 3]
    raw = sqlite_driver.connect(str(path))
    assert raw.execute("PRAGMA user_version").fetchone() == (VERSION,)
    raw.close()


def test_a_file_written_by_version_1_is_read_and_continued(path: Path) -> None:
    for suffix in ("", "-head"):
        shutil.copyfile(f"{DATA / 'log-v1.db'}{suffix}", f"{path}{suffix}")

    with opened(path) as log:
        again = append(log, GOLDEN)
        new = append(log, [row(0)])
        events, error, skipped = log.read(EVERYTHING, Span(), 100).events()

    assert (again, new) == ([1, 2, 3, 4, 5], [6])
    assert (error, skipped) == (None, 0)
    assert [
        (e.publisher_id, e.sequence, e.published_at, e.key, e.payload, dict(e.headers), e.offset) for e in events[:5]
    ] == [
        (*msgspec.structs.astuple(stored)[:5], msgspec.msgpack.decode(stored.headers) if stored.headers else {}, n + 1)
        for n, stored in enumerate(GOLDEN)
    ]
    assert read(path) == [1, 2, 3, 4, 5, 6]
    open_log(BusConfig(log=f"{path}.new")).close(5.0)
    assert schema(path) == schema(Path(f"{path}.new"))


def test_after_a_power_cut_a_log_that_was_not_synced_never_gives_an_offset_out_again(tmp_path: Path) -> None:
    """With durability "os" the end may be gone, of the log and of the record; the promise on offsets holds."""
    path = tmp_path / "app.db"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER.replace("log=sys.argv[1]", 'log=sys.argv[1], durability="os"'), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        owner.kill()
    record = Path(f"{path}-head")
    reserved = read_record(str(path)).reserved  # type: ignore[union-attr]
    data = bytearray(record.read_bytes())
    data[24:60] = b"another boot of this system .........."[:36]
    record.write_bytes(bytes(data))

    answers: SimpleQueue[Any] = SimpleQueue()
    log = open_log(BusConfig(log=str(path), durability="os"))
    log.append([row(100)], answers.put, None)
    offsets = offsets_of(answers.get(timeout=10))
    log.close(5)

    assert list(offsets) == [reserved + 1]


def test_after_a_power_cut_another_log_in_its_place_is_still_noticed(tmp_path: Path) -> None:
    path, other = tmp_path / "app.db", tmp_path / "other.db"
    for each in (path, other):
        log = open_log(BusConfig(log=str(each), durability="os"))
        append(log, [row(sequence) for sequence in range(10)])
        log.close(5)
    data = bytearray(Path(f"{path}-head").read_bytes())
    data[16:24] = (1).to_bytes(8, "little")  # not closed by its owner
    data[24:60] = b"another boot of this system .........."[:36]
    Path(f"{path}-head").write_bytes(bytes(data))
    shutil.copyfile(other, path)

    with pytest.raises(LogDamaged, match="a different log"):
        open_log(BusConfig(log=str(path), durability="os"))


def test_a_file_that_is_not_a_log_is_not_offered_to_accept_its_loss(tmp_path: Path) -> None:
    (tmp_path / "my notes.db").write_text("these are my notes" * 1000)
    (tmp_path / "empty.db").touch()
    connection = sqlite_driver.connect(str(tmp_path / "mine.db"))
    connection.execute("CREATE TABLE mine (x)")
    connection.close()

    for name, read_only in (("my notes.db", True), ("my notes.db", False), ("empty.db", True), ("mine.db", False)):
        with pytest.raises(LogDamaged, match="is not a zbus log or backup") as caught:
            open_log(BusConfig(log=str(tmp_path / name), read_only=read_only))
        assert "--accept-loss" not in str(caught.value)


def test_the_path_in_the_command_of_an_error_is_quoted() -> None:
    assert "zbus log verify 'my log.db' --accept-loss" in str(LogDamaged("my log.db", "it is damaged"))


def test_a_copy_without_its_head_record_says_how_to_copy_a_log(log_path: Path, tmp_path: Path) -> None:
    log = open_log(BusConfig(log=str(log_path)))
    append(log, GOLDEN)
    log.close(5.0)
    shutil.copyfile(log_path, tmp_path / "copy.db")

    for read_only in (True, False):
        with pytest.raises(LogDamaged, match=r"ends with -head too, or copy the log with: zbus log backup"):
            open_log(BusConfig(log=f"{tmp_path}/copy.db", read_only=read_only))


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for suffix in ("", "-head"):
        Path(f"{DATA / 'log-v1.db'}{suffix}").unlink(missing_ok=True)
    with opened(DATA / "log-v1.db") as golden:
        append(golden, GOLDEN[:3])
        append(golden, GOLDEN[3:])


def test_a_head_record_that_cannot_be_written_is_an_error_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    Path(f"{path}-head").mkdir()  # as on a read-only file system, opening it for writing fails

    with pytest.raises(LogError, match=r"cannot be opened for writing.*Nothing was opened or changed.*read_only=True"):
        open_log(BusConfig(log=str(path)))


def test_a_file_that_sqlite_cannot_open_says_what_reading_needs(tmp_path: Path) -> None:
    """On a read-only file system SQLite cannot create the file -shm: the same code as for a file that is missing."""
    path = str(tmp_path / "missing" / "app.db")

    with pytest.raises(LogError, match=r"needs a folder in which .*app.db-shm can be created.*copy the log"):
        with log_errors(path):
            make_engine(path, read_only=True).connect()
