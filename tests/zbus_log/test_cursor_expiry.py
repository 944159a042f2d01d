"""Durable subscriptions that nothing uses: they expire, retention passes them, and coming back is a loud error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from log_support import append, opened, wait_until

from zbus import BusConfig
from zbus.errors import ConfigInvalid, CursorError
from zbus.ports.log import Row
from zbus_log import Rules, SqliteLog


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.02)
    return tmp_path / "app.db"


def fill(log: SqliteLog, events: int = 100) -> None:
    append(log, [Row(1, number, time.time_ns(), "a/b", b"x", None) for number in range(events)])


def leave(log: SqliteLog, name: str, position: int) -> None:
    """Use a durable name and let it go."""
    log.cursors.release(name, log.cursors.claim(name, ["**"], position).token)


def expired(log: SqliteLog) -> set[str]:
    return {cursor.name for cursor in log.cursors.list() if cursor.expired_at_ns is not None}


def test_an_unused_cursor_expires_and_retention_no_longer_waits_for_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(path, cursor_ttl_s=0.3, retain_events=10) as log:
        leave(log, "forgotten", 5)
        fill(log)
        wait_until(lambda: log.low_water() == 5)

        wait_until(lambda: expired(log) == {"forgotten"})
        wait_until(lambda: log.low_water() == 90)

    (report,) = [each.zbus for each in caplog.records if "LOG_CURSOR_EXPIRED" in each.message]  # type: ignore[attr-defined]
    assert (report["durable"], report["offset"], report["code"]) == ("forgotten", 5, "cursor_expired")


def test_a_cursor_that_is_in_use_does_not_expire_even_if_nothing_arrives(path: Path) -> None:
    with opened(path, cursor_ttl_s=0.3) as log:
        lease = log.cursors.claim("quiet", ["**"], 0)
        leave(log, "forgotten", 0)
        wait_until(lambda: expired(log) == {"forgotten"})
        time.sleep(0.3)
        assert expired(log) == {"forgotten"}

        log.cursors.release("quiet", lease.token)
        assert expired(log) == {"forgotten"}  # its time begins now
        wait_until(lambda: expired(log) == {"forgotten", "quiet"})


def test_an_expired_name_cannot_be_claimed_until_it_is_reset_or_deleted(path: Path) -> None:
    with opened(path, cursor_ttl_s=0.3) as log:
        append(log, [Row(1, number, time.time_ns(), "a/b", b"x", None) for number in range(10)])
        leave(log, "a", 5)
        leave(log, "b", 5)
        wait_until(lambda: expired(log) == {"a", "b"})

        for _ in range(2):
            with pytest.raises(CursorError, match=rf"it expired at .*offset 5.*zbus log cursors {path} --reset a --to"):
                log.cursors.claim("a", ["**"], 0)
        log.cursors.reset("a", 7)
        log.cursors.delete("b")

        assert log.cursors.claim("a", ["**"], 0).offset == 7
        assert log.cursors.claim("b", ["**"], 3).offset == 3
        assert expired(log) == set()


def test_cursors_do_not_expire_unless_a_time_is_set(path: Path) -> None:
    with opened(path, retain_events=10) as log:
        leave(log, "forgotten", 5)
        fill(log)
        time.sleep(0.3)

        assert expired(log) == set()
        assert log.prune(Rules(max_events=10)).held_by == "forgotten"


def test_a_clock_that_jumps_does_not_let_cursors_expire(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path, cursor_ttl_s=3600) as log:
        leave(log, "a", 5)
        now = time.time_ns()
        monkeypatch.setattr("time.time_ns", lambda: now + 365 * 86_400 * 1_000_000_000)
        monkeypatch.setattr("zbus_log.pruner.EXPIRE_S", 0.01)
        time.sleep(0.5)

        assert expired(log) == set()


def test_the_setting_needs_a_log() -> None:
    with pytest.raises(ConfigInvalid, match="cursor_ttl_s"):
        BusConfig(cursor_ttl_s=60)
