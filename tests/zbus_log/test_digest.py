"""The digest of a log up to an offset: the chain over its blocks, through sealing, retention, losses and restarts."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from log_support import append, ask, opened, raw, sealed_blocks, wait_until

from zbus.errors import LogFull
from zbus.ports.log import Row
from zbus_log import Rules, SqliteLog
from zbus_log.file.chain import Chain
from zbus_log.file.tables import BLOCK

OLD = (
    Path(__file__).parents[1] / "data" / "v1" / "log.db"
)  # of version 0.1; retention removed block 0, block 1 is sealed


def row(sequence: int, payload: bytes = b"") -> Row:
    return Row(1, sequence, sequence, f"k/{sequence % 7}", payload or b"payload-%d" % sequence, None)


def rows(first: int, last: int) -> list[Row]:
    return [row(number) for number in range(first, last + 1)]


def checksums(path: Path) -> dict[int, int]:
    connection = raw(path)
    found = dict(connection.execute("SELECT offset, checksum FROM events").fetchall())
    connection.close()
    return found


def hashed(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def expected(leaves: Mapping[int, int], offset: int, first_block: int = 0) -> bytes:
    """The digest, by its definition."""
    before = hashed(b"")
    for block in range(first_block, offset // BLOCK + 1):
        end = min(offset, block * BLOCK + BLOCK - 1)
        wanted = [leaves[each] for each in range(block * BLOCK, end + 1) if each in leaves]
        before = hashed(before + struct.pack(f"<{len(wanted)}I", *wanted))
    return before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


def assert_digests(log: SqliteLog, path: Path, leaves: Mapping[int, int], offsets: list[int]) -> None:
    """By the owner and by a reader."""
    with opened(path, read_only=True) as reader:
        for offset in offsets:
            wanted = expected(leaves, offset)
            assert log.digest(offset) == wanted, offset
            assert reader.digest(offset) == wanted, offset


EDGES = [0, 1, 2, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 700]


def test_the_digest_is_a_chain_of_the_blocks_checksums(path: Path) -> None:
    with opened(path) as log:
        assert log.digest(0) == expected({}, 0)
        for first in range(1, 2 * BLOCK + 1001, 777):
            append(log, rows(first, min(first + 776, 2 * BLOCK + 1000)))
        head = log.head()
        wait_until(lambda: sealed_blocks(path) == 2)
        assert_digests(log, path, checksums(path), [*EDGES, head - 1, head])
        assert log.digest(head + 1) == log.digest(-1) == b""

    assert head == 2 * BLOCK + 1000


def test_the_digest_of_the_head_is_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as log:
        append(log, rows(1, 10))
        wanted = expected(checksums(path), 10)
        monkeypatch.setattr("zbus_log.log.digest_at", lambda *_: pytest.fail("the file is read"))
        assert log.digest(10) == wanted


def test_the_digest_goes_on_after_a_restart_at_every_place_in_a_block(path: Path) -> None:
    offsets = [1, 700, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]
    before = 0
    for offset in offsets:
        with opened(path) as log:
            append(log, rows(before + 1, offset))
            assert log.digest(offset) == expected(checksums(path), offset)
        before = offset

    with opened(path) as log:
        assert_digests(log, path, checksums(path), offsets)


def test_blocks_that_were_not_sealed_before_a_kill_get_their_digest_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.write.writer.Writer._seal_next", lambda self: 1 / 0)
    with opened(path) as log:
        append(log, rows(1, 3 * BLOCK + 9))
        leaves = checksums(path)
        assert_digests(log, path, leaves, EDGES)
    monkeypatch.undo()

    with opened(path) as log:
        append(log, rows(3 * BLOCK + 10, 3 * BLOCK + 10))
        wait_until(lambda: sealed_blocks(path) == 3)
        assert_digests(log, path, checksums(path), [*EDGES, 3 * BLOCK + 10])


def test_retention_of_unsealed_events_does_not_change_the_digest(path: Path) -> None:
    with opened(path) as log:
        append(log, rows(1, BLOCK + 900))
        leaves = checksums(path)
        wait_until(lambda: sealed_blocks(path) == 1)
        for until in (BLOCK + 3, BLOCK + 4, BLOCK + 600):
            log.prune(Rules(until=until))
        assert_digests(log, path, leaves, [BLOCK - 1, BLOCK, BLOCK + 3, BLOCK + 300, BLOCK + 600, BLOCK + 601])
        append(log, rows(BLOCK + 901, BLOCK + 950))
        leaves |= checksums(path)
    with opened(path) as log:
        assert_digests(log, path, leaves, [BLOCK - 1, BLOCK + 600, BLOCK + 950])
        log.prune(Rules(until=BLOCK + 950))
        assert ask(path, "SELECT count(*) FROM events") == 0
    with opened(path) as log:
        assert_digests(log, path, leaves, [BLOCK + 1, BLOCK + 950])
        append(log, rows(BLOCK + 951, 2 * BLOCK + 1))
        leaves |= checksums(path)
        wait_until(lambda: sealed_blocks(path) == 2)
        assert ask(path, "SELECT count(*) FROM removed") == 0
        assert_digests(log, path, leaves, [BLOCK - 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
        assert log.digest(BLOCK + 950) == b""  # its block is sealed, and its leaves are gone


def test_retention_of_sealed_blocks_keeps_the_digest_after_them(path: Path) -> None:
    with opened(path) as log:
        append(log, rows(1, 3 * BLOCK + 5))
        leaves = checksums(path)
        wait_until(lambda: sealed_blocks(path) == 3)
        log.prune(Rules(until=2 * BLOCK + 10))
        assert_digests(log, path, leaves, [3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 5])
        assert log.digest(2 * BLOCK + 11) == log.digest(5) == b""


def test_lost_offsets_have_no_leaf(path: Path) -> None:
    with opened(path) as log:
        append(log, rows(1, 5))
    Path(f"{path}-head").unlink()
    with opened(path, accept_loss=True) as log:
        (far,) = append(log, [row(6)])
        assert far > 1 << 20
        wait_until(lambda: sealed_blocks(path) == far // BLOCK)
        assert_digests(log, path, checksums(path), [3, 5, 6, BLOCK - 1, BLOCK, far - 1, far])
        leaves = checksums(path)
        append(log, rows(7, 9))
        leaves |= checksums(path)
        log.prune(Rules(until=far + 1))
        assert_digests(log, path, leaves, [far - 1, far, far + 1, far + 3])


def test_lost_offsets_between_removed_events_have_no_leaf(path: Path) -> None:
    with opened(path) as log:
        append(log, rows(1, 9))
    connection = raw(path)
    connection.execute("UPDATE state SET low_water = 9")  # so that the trigger permits it
    connection.execute("DELETE FROM events WHERE offset IN (4, 5)")
    connection.execute("UPDATE state SET low_water = 0")
    connection.close()
    leaves = checksums(path)
    with opened(path, accept_loss=True) as log:
        log.prune(Rules(until=8))
        assert_digests(log, path, leaves, list(range(10)))


def test_in_an_old_file_the_chain_begins_after_the_last_sealed_block(path: Path) -> None:
    for suffix in ("", "-head"):
        shutil.copyfile(f"{OLD}{suffix}", f"{path}{suffix}")
    copy = path.with_name("copy.db")
    with opened(path) as log:
        head = log.head()
        for suffix in ("", "-wal", "-head"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        assert log.digest(head) == expected(checksums(path), head, first_block=2)
        assert log.digest(2 * BLOCK - 1) == log.digest(2 * BLOCK - 2) == b""
        append(log, rows(1 << 40, (1 << 40) + BLOCK))
        wait_until(lambda: ask(path, "SELECT max(block) FROM blocks") == 2)
        for offset in (2 * BLOCK, 3 * BLOCK - 2, 3 * BLOCK - 1, 3 * BLOCK, head + BLOCK + 1):
            assert log.digest(offset) == expected(checksums(path), offset, first_block=2)
    with opened(copy) as log:
        assert log.digest(head) == expected(checksums(path), head, first_block=2)


@pytest.mark.parametrize("was_stored", [False, True])
def test_a_failed_commit_is_in_the_digest_only_if_it_was_stored_after_all(
    path: Path, monkeypatch: pytest.MonkeyPatch, was_stored: bool
) -> None:
    with opened(path) as log:
        append(log, rows(1, 5))
        writer, insert = log._owner, log._owner._insert

        def fail(batch: Any, first: int) -> None:
            if was_stored:
                insert(batch, first)
            else:
                writer._leaves = b"not stored.."
            raise LogFull(str(path))

        monkeypatch.setattr(writer, "_insert", fail)
        if was_stored:
            append(log, rows(6, 8))
        else:
            with pytest.raises(LogFull):
                append(log, rows(6, 8))
        monkeypatch.undo()
        append(log, rows(6, 9))
        assert log.digest(9) == expected(checksums(path), 9)


def test_the_writer_keeps_no_digests_of_sealed_blocks(path: Path) -> None:
    with opened(path) as log:
        append(log, rows(1, 5 * BLOCK))
        wait_until(lambda: sealed_blocks(path) == 5)
        chain = log._owner.chain
        assert isinstance(chain, Chain)
        assert len(chain._unsealed) <= 1
