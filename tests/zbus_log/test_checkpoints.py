"""A checkpoint that fails is reported and counted, and no event is lost by it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from log_support import append
from mesh_fakes import recorded

from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus_log import SqliteLog
from zbus_log.file.database import WAL_BYTES

PAYLOAD = bytes(1 << 20)
FILLED = 4 * WAL_BYTES // len(PAYLOAD)  # events until the file is longer than its write-ahead log can become


@contextmanager
def no_longer_files(size: int) -> Iterator[None]:
    """Let the kernel refuse every write beyond a length, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def rows(first: int, count: int) -> list[Row]:
    return [Row(1, sequence, sequence, "a/b", PAYLOAD, None) for sequence in range(first, first + count)]


def test_a_checkpoint_that_fails_is_reported_and_counted(tmp_path: Path) -> None:
    log = SqliteLog(str(tmp_path / "app.db"), synchronous="OFF")
    try:
        for first in range(0, FILLED, 4):
            append(log, rows(first, 4))
        assert log.diagnostics()["checkpoint_failures"] == 0
        with recorded() as records, no_longer_files((tmp_path / "app.db").stat().st_size + (1 << 20)):
            for first in range(FILLED, 2 * FILLED - 4, 4):
                append(log, rows(first, 4))
            failures = log.diagnostics()["checkpoint_failures"]
        found = [each for each in records if each["record"] == "LOG_CHECKPOINT_FAILED"]
        assert failures == len(found) > 0
        assert found[0]["code"] == "checkpoint_failed"
        assert "disk I/O error" in found[0]["reason"]
        assert found[0]["wal_bytes"] > 2 * WAL_BYTES
        last = append(log, rows(2 * FILLED, 1))[0]
        assert log.read(KeySet.all(), Span(last - 1), 1).events()[0][0].payload == PAYLOAD
    finally:
        log.close(20.0)
