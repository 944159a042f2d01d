"""What the log says about offsets, so that nothing outside it calculates with them."""

from __future__ import annotations

from pathlib import Path

from log_support import append
from mesh_fakes import rows

from zbus_log import SqliteLog


def test_an_offset_follows_the_one_of_the_event_before(log_path: Path) -> None:
    log = SqliteLog(str(log_path))
    try:
        offsets = append(log, rows(range(3)))

        assert log.follows(0, offsets[0])
        assert log.follows(offsets[0], offsets[1])
        assert not log.follows(offsets[0], offsets[2])
        assert not log.follows(offsets[1], offsets[1])
        assert not log.follows(offsets[1], offsets[0])
        assert log.count(0, offsets[2]) == 3
        assert log.count(offsets[0], offsets[2]) == 2
        assert log.count(offsets[2], offsets[2]) == 0
    finally:
        log.close(5)
