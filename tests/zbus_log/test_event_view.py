"""The view `event_log` has the same events as a replay, for any program with SQLite and nothing of zbus."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from backup_support import read
from log_support import append, ask, opened, raw, sealed_blocks, wait_until

from zbus.event import Event, Provenance
from zbus.headers import encode_headers
from zbus.ports.log import Row
from zbus_log import Rules, SqliteLog, verify
from zbus_log.backup.fork import fork
from zbus_log.backup.make import make_backup
from zbus_log.backup.restore import restore
from zbus_log.file.tables import BLOCK

DATA_FOLDER = Path(__file__).parents[1] / "data" / "v1"
SIZE = 2 * BLOCK + 300  # two sealed blocks, and an end that is not sealed
TIME_NS = 1_700_000_000_000_000_000

HEADERS: list[dict[str, str]] = [
    {},
    {"content-type": "application/json"},
    {"schema": "orders", "note": 'a "quoted" \\ text, \u00e9\u4e16', "empty": ""},
    {f"header-{number}": "v" * number for number in range(40)},  # more than a short map has
    {"long": "x" * 300, "longer": "\u00e9" * 20_000},
]
# Numbers of every size; their last byte is the one with which a map begins.
ORIGINS = [
    None,
    Provenance((1 << 60) + 0x81, 0x81, (), "nats"),
    Provenance(5, (1 << 33) + 0x81, (3, 0x181, 0x10081, (1 << 62) + 0x81), ""),
    Provenance(0x181, 0x10081, tuple(range(1, 17)), "transport-with-a-long-name-" * 3),
]

# A program without zbus: it prints each row of the view as JSON.
PROGRAM = """
import json, sqlite3, sys
log = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
columns = "offset, published_at, time, key, publisher, sequence, hex(payload), headers"
for row in log.execute(f"SELECT {columns} FROM event_log ORDER BY offset"):
    print(json.dumps(row))
assert not any(name.startswith(("zbus", "pysqlite3")) for name in sys.modules)
"""


def row(number: int) -> Row:
    """An event; one in a hundred has headers or comes from another node, in every combination."""
    headers, origin = HEADERS[number // 100 % len(HEADERS)], ORIGINS[number // 100 // len(HEADERS) % len(ORIGINS)]
    special = number % 100 == 0
    payload = b'{"number":%d}' % number if number % 3 else bytes(range(number % 256))
    encoded = encode_headers(headers, None, None) if special else None
    published_at = TIME_NS + number * 1_000_000_007
    return Row(7 + number % 2, number, published_at, f"k/{number % 11}", payload, encoded, origin if special else None)


def view(path: Path) -> list[list[Any]]:
    """The rows of the view, read in another process with the interpreter's own SQLite."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_same(rows: list[list[Any]], events: list[Event]) -> None:
    assert len(rows) == len(events)
    for (offset, published_at, time, key, publisher, sequence, payload, headers), event in zip(
        rows, events, strict=True
    ):
        assert (offset, published_at, key) == (event.offset, event.published_at, event.key)
        assert (publisher, sequence) == event.identity
        assert bytes.fromhex(payload) == event.payload
        assert json.loads(headers) == dict(event.headers)
        assert time.endswith(f".{event.published_at % 1_000_000_000:09d}Z")


def replay(path: Path) -> list[Event]:
    """The events that are in the file itself, without those of its cold tier."""
    log = SqliteLog(str(path), read_only=True)
    try:
        trimmed = ask(path, "SELECT low_water FROM state")
        return [event for event in read(log) if event.offset > trimmed]
    finally:
        log.close(5.0)


def assert_view_is_replay(path: Path) -> list[Event]:
    events = replay(path)
    assert_same(view(path), events)
    return events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    with opened(path) as log:
        append(log, [row(number) for number in range(SIZE)])
        wait_until(lambda: sealed_blocks(path) >= 2)
    return path


def test_the_view_has_what_a_replay_has_beside_an_owner_with_sealed_blocks_duplicates_and_retention(
    path: Path,
) -> None:
    with opened(path) as log:
        assert append(log, [row(5), row(SIZE), row(BLOCK + 5)]) == [6, SIZE + 1, BLOCK + 6]

        assert len(assert_view_is_replay(path)) == SIZE + 1

        log.prune(Rules(until=BLOCK + 100))
        events = assert_view_is_replay(path)
        assert [events[0].offset, events[-1].offset] == [BLOCK + 101, SIZE + 1]


def test_the_view_has_every_kind_of_headers_and_the_time_as_text(path: Path) -> None:
    rows = view(path)

    assert rows[100][2] == "2023-11-14T22:15:00.000000700Z"
    found = [json.loads(each[-1]) for each in rows]
    for number in range(0, SIZE, 100):
        assert found[number] == HEADERS[number // 100 % len(HEADERS)]
    assert found[1] == {}


def test_an_event_with_an_unknown_key_is_in_the_view_without_one(path: Path) -> None:
    connection = raw(path)
    connection.execute("DELETE FROM keys WHERE key = 'k/3'")
    connection.close()

    rows = view(path)

    assert len(rows) == SIZE
    assert {each[3] for each in rows} == {f"k/{number}" for number in range(11) if number != 3} | {None}


@pytest.mark.parametrize("name", ["log.db", "lossy.db"])
def test_a_log_of_the_first_version_is_read_without_a_view_and_gets_one_from_its_owner(
    tmp_path: Path, name: str
) -> None:
    shutil.copytree(DATA_FOLDER, tmp_path / "v1")
    path = tmp_path / "v1" / name
    events = replay(path)
    connection = raw(path)
    assert connection.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'view'").fetchone() == (0,)
    connection.close()

    with opened(path):
        pass

    assert events
    assert assert_view_is_replay(path) == events


def test_backups_restored_logs_and_forks_have_the_view(path: Path, tmp_path: Path) -> None:
    make_backup(str(path), f"{tmp_path}/app.zbus")
    with opened(path) as log:
        append(log, [row(SIZE + number) for number in range(10)])
    make_backup(str(path), f"{tmp_path}/app.zbus")
    restore(f"{tmp_path}/app.zbus", f"{tmp_path}/restored.db")
    fork(str(path), f"{tmp_path}/try.db", at=6_000)

    assert len(view(tmp_path / "app.zbus")) == SIZE + 10
    assert len(assert_view_is_replay(tmp_path / "restored.db")) == SIZE + 10
    assert len(assert_view_is_replay(tmp_path / "try.db")) == 6_000
    for name in ("restored.db", "try.db"):
        assert verify(f"{tmp_path}/{name}").problems == []


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        (["DROP VIEW event_log"], "the view event_log is missing"),
        (
            ["DROP VIEW event_log", "CREATE VIEW event_log AS SELECT * FROM events WHERE offset > 9"],
            "the view event_log was changed",
        ),
    ],
)
def test_a_view_that_is_missing_or_was_changed_is_reported(path: Path, statements: list[str], problem: str) -> None:
    connection = raw(path)
    for statement in statements:
        connection.execute(statement)
    connection.close()

    assert verify(str(path)).problems == [problem]
