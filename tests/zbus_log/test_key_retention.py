"""Retention by key: events of some keys are removed sooner or later than the others, from the middle of the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from log_support import append, ask, opened, raw, wait_until
from removed_support import KEYS, check, fill, kept, key_of, now_ns, offsets, row

from zbus import BusConfig
from zbus.config import load_config
from zbus.errors import ConfigInvalid, LogFull, LogTrimmed
from zbus.ports.log import Span
from zbus_log import Rules, SqliteLog
from zbus_log.file.tables import BLOCK
from zbus_log.retention import newest_time_ns
from zbus_log.write.removal import Removal

HOUR, DAY = 3600.0, 86_400.0
SIZE = 2 * BLOCK + 500


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.05)
    # All events are old here, and a clock that is far ahead of the newest ones would not be believed.
    monkeypatch.setattr("zbus_log.pruner.newest_time_ns", lambda _: None)


def fill_by_age(path: Path, *parts: tuple[int, float]) -> None:
    """Store events that were published so many hours ago."""
    with opened(path) as log:
        for events, hours in parts:
            fill(log, events, now_ns(hours * 60))


def is_kept(*prefixes: str) -> Callable[[str], bool]:
    return lambda key: key.startswith(prefixes)


def has_left(log: SqliteLog, left: list[int]) -> bool:
    """Return whether these events are left, also while the low-water mark moves."""
    try:
        return offsets(log) == left
    except LogTrimmed:
        return False


def test_telemetry_goes_sooner_and_orders_stay(path: Path) -> None:
    fill_by_age(path, (SIZE, 2), (100, 0))
    with opened(path, retain_age_s=DAY, retain_keys_s={"telemetry/**": HOUR, "shop/**": None}) as log:
        digest = log.digest(SIZE + 100)
        young = list(range(SIZE + 1, SIZE + 101))
        left = kept(SIZE, is_kept("shop", "audit")) + young
        wait_until(lambda: len(offsets(log)) == len(left))
        assert offsets(log) == left
        assert offsets(log, ["telemetry/**"]) == [n for n in young if key_of(n).startswith("telemetry")]
        assert log.digest(SIZE + 100) == digest
    check(path, SIZE - len(left) + 100 - log_low(path))


def log_low(path: Path) -> int:
    return int(ask(path, "SELECT low_water FROM state"))


def test_the_first_expression_that_matches_counts(path: Path) -> None:
    fill_by_age(path, (400, 2))
    rules = {"telemetry/cpu": None, "telemetry/**": HOUR}
    with opened(path, retain_keys_s=rules) as log:
        wait_until(lambda: len(offsets(log)) == 300)
        assert {key_of(n) for n in offsets(log)} == set(KEYS) - {"telemetry/disk/a"}
    with opened(path, retain_keys_s=dict(reversed(rules.items()))) as log:
        wait_until(lambda: len(offsets(log)) == 200)
        assert {key_of(n) for n in offsets(log)} == {"shop/orders", "audit/login"}


def test_the_low_water_mark_advances_as_far_as_nothing_is_kept(path: Path) -> None:
    fill_by_age(path, (BLOCK + 1000, 30), (BLOCK, 2), (10, 0))
    rules = {"telemetry/**": HOUR, "shop/**": None}
    with opened(path, retain_age_s=DAY, retain_keys_s=rules) as log:
        left = kept(BLOCK + 1000, is_kept("shop")) + kept(2 * BLOCK + 1000, is_kept("shop", "audit"), BLOCK + 1001)
        left += list(range(2 * BLOCK + 1001, 2 * BLOCK + 1011))
        wait_until(lambda: has_left(log, left))
        wait_until(lambda: log.low_water() == left[0] - 1)
    check(path, 2 * BLOCK + 1010 - len(left) - left[0] + 1)
    with opened(path, retain_age_s=DAY, retain_keys_s={"telemetry/**": HOUR}) as log:  # orders are kept no longer
        wait_until(lambda: log.low_water() >= BLOCK + 1000)
        assert offsets(log) == [n for n in left if n > BLOCK + 1000]
    check(path, ask(path, "SELECT sum(last - max(first, (SELECT low_water FROM state) + 1) + 1) FROM removed"))


def test_a_log_that_only_has_old_telemetry_becomes_empty(path: Path) -> None:
    fill_by_age(path, (SIZE, 2))
    with opened(path, retain_keys_s={"**": HOUR}) as log:
        wait_until(lambda: log.low_water() == SIZE)
        assert offsets(log) == []
        assert log.head() == SIZE
        wait_until(lambda: ask(path, f"SELECT count(*) FROM removed WHERE first < {2 * BLOCK}") == 0)
        fill(log, 3)
        assert offsets(log) == [SIZE + 1, SIZE + 2, SIZE + 3]
    check(path, 0)


def test_unacknowledged_events_hold_it_back(path: Path) -> None:
    fill_by_age(path, (SIZE, 2))
    with opened(path) as log:
        lease = log.cursors.claim("audit", ["audit/**"], BLOCK + 5)
        log.cursors.release("audit", lease.token)
    gone = kept(BLOCK + 5, is_kept("telemetry"))
    with opened(path, retain_keys_s={"telemetry/**": HOUR}) as log:
        wait_until(lambda: len(offsets(log)) == SIZE - len(gone))
        time.sleep(0.3)
        assert offsets(log) == sorted(set(range(1, SIZE + 1)) - set(gone))
        assert log.prune(Rules(keys=(("telemetry/**", HOUR),))).held_by == "audit"
        log.cursors.delete("audit")
        whole = 2 * BLOCK - 1  # a part of a block waits for a sixteenth of the age
        left = kept(whole, is_kept("shop", "audit")) + list(range(whole + 1, SIZE + 1))
        wait_until(lambda: has_left(log, left))
        log.prune(Rules(keys=(("telemetry/**", HOUR),)))
        assert offsets(log) == kept(SIZE, is_kept("shop", "audit"))
    check(path, SIZE - len(kept(SIZE, is_kept("shop", "audit"))) - log_low(path))


def test_cursors_can_be_ignored(path: Path) -> None:
    fill_by_age(path, (100, 2))
    with opened(path) as log:
        log.cursors.claim("audit", ["**"], 5)
        found = log.prune(Rules(keys=(("telemetry/**", HOUR),), ignore_cursors=True))
        assert (found.removed, found.held_by) == (50, None)


def test_what_was_examined_is_not_examined_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[int] = []
    choose = Removal.choose

    def noted(self: Removal, block: int, *rest: Any) -> Any:
        examined.append(block)
        return choose(self, block, *rest)

    monkeypatch.setattr(Removal, "choose", noted)
    fill_by_age(path, (SIZE, 2))
    rules: dict[str, Any] = {"retain_keys_s": {"telemetry/**": HOUR, "shop/**": None}}
    with opened(path, **rules) as log:
        wait_until(lambda: has_left(log, kept(SIZE, is_kept("shop", "audit"))))
        time.sleep(0.3)
        assert examined == [0, 1, 2]
        fill(log, 10, now_ns(90))
        time.sleep(0.3)
        assert examined == [0, 1, 2]  # a part of a block waits for a sixteenth of the age
    with opened(path, **rules) as log:
        wait_until(lambda: len(offsets(log, ["telemetry/**"])) == 0)
        time.sleep(0.2)
        assert set(examined[3:]) == {2}
    with opened(path, retain_keys_s={"telemetry/**": 2 * HOUR}) as log:  # other rules begin anew
        wait_until(lambda: 0 in examined[3:])


def test_age_follows_the_order_of_offsets(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(n, now_ns(120)) for n in range(1, 101)])
        append(log, [row(n, now_ns()) for n in range(101, 111)])
        append(log, [row(n, now_ns(120)) for n in range(111, 121)])  # stored later, by a slow clock
        log.prune(Rules(keys=(("telemetry/**", HOUR),)))
        assert offsets(log) == kept(100, is_kept("shop", "audit")) + list(range(101, 121))


def test_a_clock_that_jumps_does_not_remove_young_events(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    fill_by_age(path, (200, 0))
    monkeypatch.setattr("zbus_log.pruner.newest_time_ns", newest_time_ns)
    monkeypatch.setattr("time.time_ns", lambda: now + int(365 * DAY * 1e9))
    with opened(path, retain_keys_s={"telemetry/**": DAY}) as log:
        append(log, [row(201, now)])
        time.sleep(0.4)
        assert len(offsets(log)) == 201


def test_a_number_and_a_size_stay_global(path: Path) -> None:
    fill_by_age(path, (SIZE, 2))
    with opened(path, retain_events=100, retain_keys_s={"telemetry/**": HOUR, "shop/**": None}) as log:
        wait_until(lambda: 0 < ask(path, "SELECT count(*) FROM events") <= 50)  # the newest hundred, without telemetry
        assert offsets(log) == kept(SIZE, is_kept("shop", "audit"), log.low_water() + 1)
    check(path, SIZE - log_low(path) - len(kept(SIZE, is_kept("shop", "audit"), log_low(path) + 1)))


def test_a_damaged_block_is_reported_and_passed_over(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill_by_age(path, (SIZE, 2))
    connection = raw(path)
    connection.execute("UPDATE by_key SET offsets = '[7]' WHERE block = 0 AND key = 1")
    connection.close()
    with opened(path, retain_keys_s={"telemetry/**": HOUR}) as log:
        wait_until(lambda: offsets(log)[-1] < SIZE + 1 and len(offsets(log)) == BLOCK - 1 + half(SIZE, BLOCK))
        assert "LOG_TASK_FAILED" in caplog.text
        assert len(offsets(log, span=Span(BLOCK - 1))) == half(SIZE, BLOCK)


def test_a_block_is_examined_again_after_the_disk_was_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_by_age(path, (SIZE, 2))
    rules = Rules(keys=(("telemetry/**", HOUR),))
    with opened(path) as log:
        with monkeypatch.context() as full:
            full.setattr(Removal, "remove", fail_with_full_disk)
            for _ in range(3):
                with pytest.raises(LogFull):
                    log.prune(rules)
        log.prune(rules)
        assert offsets(log, ["telemetry/**"]) == []
    with opened(path) as log:
        assert offsets(log) == kept(SIZE, is_kept("shop", "audit"))


def fail_with_full_disk(*_: object) -> None:
    raise LogFull("app.db")


def half(last: int, first: int) -> int:
    return len(kept(last, is_kept("shop", "audit"), first))


def test_retried_events_are_not_stored_again(path: Path) -> None:
    fill_by_age(path, (200, 2))
    with opened(path) as log:
        log.prune(Rules(keys=(("telemetry/**", HOUR),)))
        append(log, [row(n) for n in range(150, 201)])
        assert log.head() == 200


def test_a_key_expression_must_be_valid_and_an_age_positive() -> None:
    for wrong in ({"a//b": 1}, {"a/**": 0}, {"a/**": -1}, {"a/**": "old"}, {"a/**/**": 1, "a/**": 2}):
        with pytest.raises(ConfigInvalid, match="retain_keys_s"):
            BusConfig(log="app.db", retain_keys_s=wrong)
    with pytest.raises(ConfigInvalid, match="needs a log"):
        BusConfig(retain_keys_s={"a/**": 1})


def test_it_can_be_set_in_the_environment_and_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBUS_LOG", "app.db")
    monkeypatch.setenv("ZBUS_RETAIN_KEYS_S", '{"telemetry/**": 3600, "orders/**": null}')
    assert BusConfig().retain_keys_s == {"telemetry/**": 3600.0, "orders/**": None}
    monkeypatch.delenv("ZBUS_RETAIN_KEYS_S")
    file = tmp_path / "zbus.toml"
    file.write_text('[retain_keys_s]\n"telemetry/**" = 3600\n"orders/**" = "forever"\n')
    monkeypatch.setenv("ZBUS_CONFIG", str(file))
    assert load_config().retain_keys_s == {"telemetry/**": 3600.0, "orders/**": None}


def test_the_time_of_retention_stays_stored_when_retention_by_key_notes_what_it_examined(path: Path) -> None:
    fill_by_age(path, (SIZE, 2))
    assert ask(path, "SELECT count(*) FROM examined") == 0  # without retention, nothing is stored
    with opened(path, retain_keys_s={"telemetry/**": HOUR}):
        wait_until(lambda: ask(path, "SELECT count(*) FROM examined WHERE rule LIKE '[%' AND until > 0") == 1)

    assert ask(path, "SELECT count(*) FROM examined WHERE rule = 'clock/time_ns'") == 1
