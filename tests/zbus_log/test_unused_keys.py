"""Keys without events: retention removes them, their ids are never used again, and size limits are met without loss."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from log_support import append, ask, opened, raw, wait_until

from zbus import BusConfig
from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus_log import Rules, SqliteLog, open_log, verify
from zbus_log.file.tables import BLOCK

EVERYTHING = KeySet(["**"])


def row(sequence: int, key: str, payload: bytes = b"x" * 10) -> Row:
    return Row(1, sequence, time.time_ns(), key, payload, None)


def fill(log: SqliteLog, path: Path, first: int, events: int, one_key: str | None = None) -> None:
    """Append events, each with its own key unless they share one, and wait until their blocks are sealed."""
    numbers = range(first, first + events)
    rows = [row(number, one_key or f"events/Todo/{number:08d}-aaaa-bbbb-cccc-dddddddd") for number in numbers]
    append(log, rows)
    wait_until(lambda: ask(path, "SELECT ifnull(max(block), -1) FROM blocks") >= log.head() // BLOCK - 1)


def keys_of(log: SqliteLog) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    span = Span(log.low_water(), log.head())
    while span.after < log.head():
        page = log.read(EVERYTHING, span, 4000)
        events, error, _ = page.events()
        assert error is None
        found += [(event.offset, event.key) for event in events]
        span = span._replace(after=page.covered)
    return found


def test_a_size_limit_removes_keys_without_events_and_not_every_event(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with opened(path) as log:
        fill(log, path, 0, 20_000)
        fill(log, path, 20_000, 20_000, "a/b/c")

    with opened(path, retain_bytes=1_500_000) as log:
        append(log, [row(40_000, "a/b/c")])
        log.prune(Rules(max_bytes=1_500_000))

        left = keys_of(log)
        pages, free, size = (ask(path, f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size"))
    assert len(left) > 8000
    assert (pages - free) * size <= 1_500_000


def test_keys_that_an_older_version_left_behind_cost_no_event(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.05)
    path = tmp_path / "app.db"
    with monkeypatch.context() as older:
        older.setattr("zbus_log.write.unused_keys.UnusedKeys.is_due", lambda *_: False)
        with opened(path) as log:
            fill(log, path, 0, 5 * BLOCK)
            log.prune(Rules(max_events=BLOCK))
            fill(log, path, 5 * BLOCK, 1000, "a/b/c")
            assert ask(path, "SELECT count(*) FROM keys") > 5 * BLOCK

    with opened(path, retain_bytes=2_000_000) as log:
        wait_until(lambda: ask(path, "SELECT count(*) FROM keys") <= 2 * BLOCK + 1)
        assert len(keys_of(log)) == BLOCK + 1000


def test_events_that_share_the_last_page_of_the_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with opened(path) as log:
        append(log, [row(number, "a/b/c") for number in range(100)])

        assert log.prune(Rules(max_bytes=1)).removed == 0

        append(log, [row(number, "a/b/c", b"x" * 4000) for number in range(100, 200)])
        assert log.prune(Rules(max_bytes=1)).removed >= 190


def test_keys_without_events_are_removed_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with opened(path) as log:
        append(log, [row(0, "kept/at/both/ends")])
        fill(log, path, 1, 4 * BLOCK)
        append(log, [row(5 * BLOCK, "kept/at/both/ends"), row(5 * BLOCK + 1, "newest")])

        log.prune(Rules(max_events=100))

        assert ask(path, "SELECT count(*) FROM keys") <= 2 * BLOCK
        assert [key for _, key in keys_of(log)][-2:] == ["kept/at/both/ends", "newest"]
    assert verify(str(path)).problems == []


def test_a_key_that_was_removed_can_be_published_to_again(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with opened(path) as log:
        append(log, [row(0, "again")])
        fill(log, path, 1, 3 * BLOCK)
        log.prune(Rules(max_events=10))
        assert ask(path, "SELECT count(*) FROM keys WHERE key = 'again'") == 0

        append(log, [row(4 * BLOCK, "again")])

        assert keys_of(log)[-1][1] == "again"


def test_an_id_is_never_used_for_another_key(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with opened(path) as log:
        append(log, [row(number, f"k/{number}") for number in range(100)])
        reader = open_log(BusConfig(log=str(path), read_only=True))
        assert len(keys_of(reader)) == 100  # it caches the names of all ids
        log.prune(Rules(until=100))
        assert ask(path, "SELECT count(*) FROM keys") == 1

        append(log, [row(100, "another")])

        assert keys_of(reader) == [(101, "another")]
        reader.close(5.0)


def test_events_that_arrive_while_keys_are_removed_keep_their_keys(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("zbus_log.write.unused_keys.KEYS_PER_STEP", 64)
    path = tmp_path / "app.db"
    with opened(path, retain_events=100) as log:
        sequence = 0
        for _ in range(40):  # each key is used, loses its events, and is used again
            append(log, [row(sequence + number, f"k/{number * 7 % 3000}") for number in range(3000)])
            sequence += 3000
        wait_until(lambda: log.head() - log.low_water() <= 100)

        append(log, [row(sequence + number, f"k/{number}") for number in range(3000)])
        wait_until(lambda: log.head() - log.low_water() <= 100)
        assert all(key.startswith("k/") for _, key in keys_of(log))
    assert verify(str(path)).problems == []


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE by_key SET key = key + (1 << 20) WHERE block = 1",
        "UPDATE blocks SET index_checksum = index_checksum + 1 WHERE block = 1",
        "UPDATE blocks SET block = block + 100 WHERE block = 1",
        "DELETE FROM blocks WHERE block = 1",
        "DELETE FROM by_key WHERE block = 1",
    ],
)
def test_keys_of_events_stay_if_the_index_of_their_block_is_damaged(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "app.db"
    with opened(path) as log:
        fill(log, path, 0, 3 * BLOCK)
        before = keys_of(log)
    connection = raw(path)
    connection.execute(damage)
    connection.close()

    with opened(path) as log:
        log.prune(Rules(until=BLOCK - 1))
        left = keys_of(log)

    assert left == before[BLOCK - 1 :]
    assert ask(path, "SELECT count(*) FROM keys") == 2 * BLOCK + 1
