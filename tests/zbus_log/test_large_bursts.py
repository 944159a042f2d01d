"""Bursts of large events: commits and statements are bounded by bytes, and an append is stored whole or not at all."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from log_support import append, ask, offsets_of

import zbus_log.write.writer as writer
from zbus import BusConfig
from zbus.errors import LogError
from zbus.ports.log import Row
from zbus_log import SqliteLog, open_log
from zbus_log.file import sqlite_driver
from zbus_log.file.rows import size_of, split_rows

# 128 events of 8 MiB, which share one object. The peak of the memory is compared with the one before.
BURST = """
import asyncio, os, resource, sys, zbus

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

async def main():
    body = os.urandom(8 << 20)
    async with zbus.open(sys.argv[1], durability="os") as bus:
        publishers = [await bus.publisher(f"a/{n}") for n in range(128)]
        await publishers[0].publish(b"warm")
        before = peak_bytes()
        results = await asyncio.gather(*[each.publish(body) for each in publishers], return_exceptions=True)
        extra = peak_bytes() - before
        failed = [str(each) for each in results if isinstance(each, Exception)]
        print(len(set(results)), len(failed), extra // (1 << 20), bus.config.pending_bytes_max // (1 << 20))
        print(failed[:1], file=sys.stderr)

asyncio.run(main())
"""


def row(sequence: int, size: int, publisher: int = 1, headers: bytes | None = None) -> Row:
    return Row(publisher, sequence, 1, f"a/{publisher}", bytes(size), headers)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "app.db")


@pytest.fixture
def log(path: str) -> Iterator[SqliteLog]:
    opened = open_log(BusConfig(log=path, durability="os"))
    yield opened
    opened.close(5.0)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of the rows of each statement, and a limit of 1,000 bytes."""
    sizes: list[int] = []
    encode = writer.encode_rows

    def note(rows: Sequence[Row], *rest: Any) -> Any:
        encoded = encode(rows, *rest)
        sizes.append(size_of(rows))
        return encoded

    monkeypatch.setattr(writer, "encode_rows", note)
    monkeypatch.setattr(writer, "STATEMENT_BYTES_MAX", 1000)
    monkeypatch.setattr(writer, "COMMIT_BYTES_MAX", 1000)
    return sizes


def test_128_concurrent_events_of_8_mib_are_all_stored_in_bounded_memory(path: str) -> None:
    child = subprocess.run([sys.executable, "-c", BURST, path], capture_output=True, text=True, timeout=120)

    assert child.returncode == 0, child.stderr
    stored, failed, extra_mib, pending_mib = map(int, child.stdout.split())
    assert (stored, failed) == (128, 0), child.stderr
    assert extra_mib <= pending_mib + 64


def test_an_append_that_is_too_large_for_a_statement_is_stored_whole_in_several(
    path: str, log: SqliteLog, statements: list[int]
) -> None:
    offsets = append(log, [row(n, 300, headers=b"\x81\xa1a\xa1b" if n % 2 else None) for n in range(10)])

    assert offsets == list(range(1, 11))
    assert max(statements) <= 1000
    assert len(statements) == 4
    assert ask(path, "SELECT sum(length(payload)) FROM events") == 3000
    assert append(log, [row(10, 5)]) == [11]


def test_a_row_that_is_larger_than_a_statement_is_stored_alone(log: SqliteLog, statements: list[int]) -> None:
    assert append(log, [row(0, 10), row(1, 5000), row(2, 10)]) == [1, 2, 3]
    assert [size for size in statements if size > 1000] == [5000]


def test_of_an_append_in_several_statements_nothing_is_stored_if_one_fails(
    path: str, log: SqliteLog, statements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, [row(0, 1)])
    statements.clear()
    encode = writer.encode_rows

    def fail_third(*given: Any) -> Any:
        if len(statements) == 2:
            raise sqlite_driver.Error("not now")
        return encode(*given)

    monkeypatch.setattr(writer, "encode_rows", fail_third)
    with pytest.raises(LogError, match="not now"):
        append(log, [row(n, 400) for n in range(1, 8)])

    assert ask(path, "SELECT count(*) FROM events") == 1
    statements.clear()
    monkeypatch.setattr(writer, "encode_rows", encode)
    assert append(log, [row(n, 400) for n in range(1, 8)]) == list(range(2, 9))


def test_appends_that_wait_share_commits_only_up_to_their_bytes(
    log: SqliteLog, statements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[int] = []
    commit = log._owner._commit

    def note(appends: list[Any]) -> None:
        commits.append(sum(size_of(rows) for rows, _, _ in appends))
        commit(appends)

    monkeypatch.setattr(log._owner, "_commit", note)
    busy, go_on = threading.Event(), threading.Event()
    answers: SimpleQueue[Any] = SimpleQueue()

    def hold(_: Any) -> None:
        busy.set()
        assert go_on.wait(20)

    log.append([row(0, 1)], hold, None)
    assert busy.wait(20)
    for n in range(1, 8):
        log.append([row(n, 400)], answers.put, None)
    go_on.set()

    assert [list(offsets_of(answers.get(timeout=20))) for _ in range(7)] == [[n] for n in range(2, 9)]
    assert max(commits) == max(statements) == 800


def test_rows_are_split_by_the_bytes_of_payloads_and_headers() -> None:
    rows = [row(0, 600), row(1, 100, headers=bytes(400)), row(2, 500), row(3, 2000), row(4, 0)]

    parts = split_rows(rows, 1000)

    assert [[each.sequence for each in part] for part in parts] == [[0], [1, 2], [3], [4]]
    assert split_rows(rows, 1_000_000) == (rows,)
