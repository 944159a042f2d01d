"""Retention: it removes the oldest events, stops at cursors unless they are ignored, and commits continue."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from log_support import append, ask, opened, wait_until

from zbus import BusConfig
from zbus.errors import LogReadOnly, LogTrimmed
from zbus.keys import KeySet
from zbus.ports.log import Row, Span
from zbus_log import Rules, SqliteLog, open_log
from zbus_log.file.tables import BLOCK

EVERYTHING = KeySet(["**"])


def row(sequence: int, payload: bytes = b"x", at_ns: int = 0) -> Row:
    return Row(1, sequence, at_ns or time.time_ns(), f"k/{sequence % 10}", payload, None)


def offsets(log: SqliteLog, expression: str = "**") -> list[int]:
    """Every offset that can be read from the beginning."""
    found: list[int] = []
    after, head, keys = log.low_water(), log.head(), KeySet([expression])
    while after < head:
        page = log.read(keys, Span(after), 4000)
        events, error, _ = page.events()
        assert error is None
        found += [event.offset for event in events]
        after = page.covered
    return found


def used_bytes(path: Path) -> int:
    pages, free, size = (ask(path, f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size"))
    return int((pages - free) * size)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def log(path: Path) -> Iterator[SqliteLog]:
    with opened(path) as log:
        yield log


# By count, age and size


@pytest.mark.parametrize("sealed", [False, True])
def test_a_number_of_events_stays(path: Path, log: SqliteLog, sealed: bool) -> None:
    size = 3 * BLOCK + 50 if sealed else 300
    append(log, [row(n) for n in range(size)])
    wait_until(lambda: not sealed or ask(path, "SELECT count(*) FROM blocks") >= 3)

    trimmed = log.prune(Rules(max_events=120))

    assert trimmed == (size - 120, size - 120, None)
    assert log.low_water() == size - 120
    assert offsets(log) == list(range(size - 119, size + 1))
    assert offsets(log, "k/3") == [n + 1 for n in range(size - 120, size) if n % 10 == 3]


def test_what_was_derived_from_removed_events_goes_with_them(path: Path, log: SqliteLog) -> None:
    append(log, [row(n) for n in range(4 * BLOCK)])
    wait_until(lambda: ask(path, "SELECT count(*) FROM blocks") >= 4)

    log.prune(Rules(max_events=10))

    assert ask(path, "SELECT count(*) FROM blocks") == 1
    assert ask(path, "SELECT count(*) FROM by_key") <= BLOCK
    assert ask(path, "SELECT count(*) FROM runs") <= 1


def test_events_over_an_age_go(log: SqliteLog) -> None:
    now = time.time_ns()
    hour = 3600 * 1_000_000_000
    append(log, [row(n, at_ns=now - 2 * hour + n) for n in range(50)])
    append(log, [row(n, at_ns=now - n) for n in range(50, 80)])

    assert log.prune(Rules(max_age_s=3 * 3600)).removed == 0
    trimmed = log.prune(Rules(max_age_s=3600))

    assert trimmed == (50, 50, None)
    assert offsets(log) == list(range(51, 81))


def test_an_old_event_behind_a_young_one_waits_for_it(log: SqliteLog) -> None:
    now = time.time_ns()
    hour = 3600 * 1_000_000_000
    moments = [now - 2 * hour, now - 2 * hour, now, now - 2 * hour, now]
    append(log, [row(n, at_ns=at) for n, at in enumerate(moments)])

    log.prune(Rules(max_age_s=3600))

    assert offsets(log) == [3, 4, 5]


def test_a_log_shrinks_to_a_size(path: Path, log: SqliteLog) -> None:
    for start in range(0, 20_000, 2000):
        append(log, [row(start + n, b"p" * 1000) for n in range(2000)])
    before, limit = used_bytes(path), 8_000_000
    assert before > 20_000_000

    trimmed = log.prune(Rules(max_bytes=limit))

    assert used_bytes(path) <= limit
    assert used_bytes(path) > limit / 2  # and no more went than had to
    assert offsets(log) == list(range(trimmed.low_water + 1, 20_001))
    log.close(5.0)
    assert path.stat().st_size < before * 0.9  # space went back to the file system


def test_a_log_shrinks_to_a_size_also_where_the_newest_events_are_the_largest(path: Path, log: SqliteLog) -> None:
    append(log, [row(n) for n in range(4000)])
    append(log, [row(4000 + n, b"p" * 20_000) for n in range(400)])
    limit = 4_000_000
    assert used_bytes(path) > 8_000_000

    log.prune(Rules(max_bytes=limit))

    assert used_bytes(path) <= limit
    assert offsets(log)


def test_everything_up_to_an_offset_goes_and_no_more_than_there_is(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(100)])

    assert log.prune(Rules(until=40)) == (40, 40, None)
    assert log.prune(Rules(until=40)) == (40, 0, None)
    assert log.prune(Rules(until=7)) == (40, 0, None)
    assert offsets(log) == list(range(41, 101))
    assert log.prune(Rules(until=10_000)) == (100, 60, None)
    assert append(log, [row(100)]) == [101]


def test_a_rule_is_one_also_where_it_names_an_offset_alone() -> None:
    assert Rules(until=0)
    assert not Rules()
    assert not Rules(ignore_cursors=True)


def test_the_strictest_rule_counts(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(100)])

    assert log.prune(Rules(max_age_s=3600, max_events=30, max_bytes=1 << 40, until=60)).low_water == 70


def test_a_rule_that_is_met_removes_nothing(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(100)])

    for rules in (
        Rules(max_events=100),
        Rules(max_events=1000),
        Rules(max_age_s=60),
        Rules(max_bytes=1 << 30),
        Rules(),
    ):
        assert log.prune(rules) == (0, 0, None)
    assert offsets(log) == list(range(1, 101))


def test_what_retention_says_it_removed_is_what_is_gone(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(n) for n in range(50)])
    Path(f"{path}-head").unlink()
    with opened(path, accept_loss=True) as log:
        (after_loss,) = append(log, [row(50)])  # a long way after offset 50
        trimmed = log.prune(Rules(max_events=1))
        assert offsets(log) == [after_loss]

    assert trimmed.removed == 50


def test_a_number_of_events_stays_also_across_a_loss(path: Path) -> None:
    with opened(path) as log:
        append(log, [row(n) for n in range(50)])
    Path(f"{path}-head").unlink()
    with opened(path, accept_loss=True) as log:
        append(log, [row(50)])
        log.prune(Rules(max_events=20))

        assert len(offsets(log)) == 20


# Durable cursors


def test_retention_stops_at_a_durable_cursor_and_says_which(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(100)])
    positions = (("fast", 90), ("slow", 30), ("middle", 60))
    leases = {name: log.cursors.claim(name, ["**"], position) for name, position in positions}
    log.cursors.release("slow", leases["slow"].token)  # it has no subscriber now, but will have one again

    trimmed = log.prune(Rules(max_events=10))

    assert trimmed == (30, 30, "slow")
    assert offsets(log) == list(range(31, 101))


def test_retention_up_to_an_offset_stops_at_a_durable_cursor_too(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(100)])
    log.cursors.claim("slow", ["**"], 30)

    assert log.prune(Rules(until=20)) == (20, 20, None)
    assert log.prune(Rules(until=80)) == (30, 10, "slow")
    assert log.prune(Rules(until=80, ignore_cursors=True)) == (80, 50, None)


def test_retention_that_no_cursor_stands_in_the_way_of_names_none(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(100)])
    log.cursors.claim("worker", ["**"], 95)

    assert log.prune(Rules(max_events=10)) == (90, 90, None)
    assert log.prune(Rules(max_events=10)) == (90, 0, None)


def test_retention_passes_a_durable_cursor_when_requested(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(100)])
    log.cursors.claim("slow", ["**"], 30)

    trimmed = log.prune(Rules(max_events=10, ignore_cursors=True))

    assert trimmed == (90, 90, None)
    assert log.cursors.list()[0].offset == 30
    with pytest.raises(LogTrimmed):  # an error, rather than resuming after a gap
        log.read(EVERYTHING, Span(30), 10)


def test_a_cursor_that_moves_on_lets_retention_go_on(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(100)])
    lease = log.cursors.claim("worker", ["**"], 10)
    assert log.prune(Rules(max_events=10)) == (10, 10, "worker")

    stored: SimpleQueue[Any] = SimpleQueue()
    log.cursors.advance("worker", lease.token, 95, stored.put)
    assert stored.get(timeout=20) is None

    assert log.prune(Rules(max_events=10)) == (90, 80, None)


# After it


def test_a_log_that_was_trimmed_to_nothing_goes_on_with_the_next_offset(path: Path) -> None:
    size = 2 * BLOCK + 10
    with opened(path) as log:
        append(log, [row(n, at_ns=1000 + n) for n in range(size)])
        wait_until(lambda: ask(path, "SELECT count(*) FROM blocks") >= 2)

        assert log.prune(Rules(max_age_s=1)) == (size, size, None)
        assert (log.head(), log.low_water(), offsets(log)) == (size, size, [])
        assert append(log, [row(size)]) == [size + 1]
        log.prune(Rules(max_age_s=1e-9))

    with opened(path) as log:
        assert (log.head(), offsets(log)) == (size + 1, [])
        assert append(log, [row(size + 1)]) == [size + 2]
        assert offsets(log) == [size + 2]
        assert ask(path, "SELECT min(block) FROM blocks") == 1  # sealing does not begin again at the first block


@pytest.mark.parametrize("restart", [False, True])
def test_events_that_stayed_are_still_known_by_their_identity(path: Path, restart: bool) -> None:
    size = 3 * BLOCK + 10
    log = open_log(BusConfig(log=str(path)))
    append(log, [row(n) for n in range(size)])
    wait_until(lambda: ask(path, "SELECT count(*) FROM blocks") >= 3)
    log.prune(Rules(max_events=2 * BLOCK + 500))
    if restart:
        log.close(5.0)
        log = open_log(BusConfig(log=str(path)))

    left = [log.low_water(), log.low_water() + 1, 2 * BLOCK, 3 * BLOCK, size - 1]  # as sequences: offset - 1
    again = append(log, [row(sequence) for sequence in left])
    new = append(log, [row(size)])
    head = log.head()
    log.close(5.0)

    assert again == [sequence + 1 for sequence in left]
    assert new == [size + 1]
    assert head == size + 1


def test_a_reader_that_was_overtaken_gets_an_error_and_sees_no_gap(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(1000)])
    page = log.read(EVERYTHING, Span(), 100)
    assert page.covered == 100

    log.prune(Rules(max_events=500))

    for keys in (EVERYTHING, KeySet(["k/1"])):
        with pytest.raises(LogTrimmed) as caught:
            log.read(keys, Span(page.covered), 100)
        assert (caught.value.after, caught.value.low_water) == (100, 500)
    with pytest.raises(LogTrimmed):
        log.narrow(Span(100))


def test_a_reader_beside_retention_sees_every_event_or_an_error(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(40_000)])
    trimming = threading.Thread(target=log.prune, args=(Rules(max_events=100),))
    trimming.start()
    seen, reported, after = [], False, 0
    try:
        while after < 40_000:
            page = log.read(EVERYTHING, Span(after), 500)
            seen += [event.offset for event in page.events()[0]]
            after = page.covered
    except LogTrimmed as error:
        reported = error.after == seen[-1]
    trimming.join(20)

    assert reported or seen[-1] == 40_000
    assert seen == list(range(seen[0], seen[-1] + 1))


# While it runs


def test_appends_go_on_while_many_events_are_removed(log: SqliteLog) -> None:
    for start in range(0, 100_000, 10_000):
        append(log, [row(start + n, b"p" * 100) for n in range(10_000)])
    sequences, longest, during = count(100_000), 0.0, 0
    trimmed: SimpleQueue[Any] = SimpleQueue()
    trimming = threading.Thread(target=lambda: trimmed.put(log.prune(Rules(max_events=100))))
    trimming.start()
    while trimming.is_alive():
        before = time.monotonic()
        append(log, [row(next(sequences))])
        longest, during = max(longest, time.monotonic() - before), during + 1

    assert trimmed.get(timeout=20).removed >= 99_900
    assert during >= 10
    assert longest < 1.0


def test_events_go_in_steps_and_a_progress_that_raises_stops_nothing_else(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(10_000)])
    steps: list[int] = []
    log.prune(Rules(max_events=5000), steps.append)
    assert sorted(set(steps)) == [4096, 5000]  # in steps, so that commits continue in between

    def fail(_: int) -> None:
        raise BrokenPipeError("nobody looks")

    outcome: SimpleQueue[BaseException] = SimpleQueue()

    def prune() -> None:
        try:
            log.prune(Rules(max_events=100), fail)
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=prune, daemon=True).start()

    assert isinstance(outcome.get(timeout=5), BrokenPipeError)
    assert append(log, [row(10_000)]) == [10_001]


def test_a_reader_cannot_remove_events(path: Path, log: SqliteLog) -> None:
    append(log, [row(n) for n in range(10)])
    reader = open_log(BusConfig(log=str(path), read_only=True))

    with pytest.raises(LogReadOnly):
        reader.prune(Rules(max_events=1))

    reader.close(5.0)
    assert offsets(log) == list(range(1, 11))


# Configured


def test_a_configured_number_of_events_is_kept_while_events_arrive(path: Path) -> None:
    with opened(path, retain_events=1000) as log:
        for start in range(0, 17_000, 1000):
            append(log, [row(start + n) for n in range(1000)])

        wait_until(lambda: log.low_water() == 16_000)  # after the last block was sealed, at 16,384
        assert offsets(log) == list(range(16_001, 17_001))


@pytest.mark.parametrize("rule", [{"retain_events": 10}, {"retain_age_s": 1e-6}, {"retain_bytes": 1}])
def test_configured_retention_works_by_itself_in_a_quiet_log(
    path: Path, rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.05)
    with opened(path, **rule) as log:
        append(log, [row(n, b"p" * 8000) for n in range(100)])

        wait_until(lambda: log.low_water() >= 90)


def test_configured_retention_works_by_itself_while_few_events_arrive(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.2)
    with opened(path, retain_events=10) as log:
        sequences, deadline = count(), time.monotonic() + 30
        while log.low_water() == 0 and time.monotonic() < deadline:
            append(log, [row(next(sequences))])  # never quiet for as long as IDLE_S
            time.sleep(0.02)

        assert log.low_water() > 0


def test_configured_retention_stops_at_a_durable_cursor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.05)
    with opened(path, retain_events=10) as log:
        lease = log.cursors.claim("worker", ["**"], 40)
        append(log, [row(n) for n in range(100)])

        wait_until(lambda: log.low_water() == 40)
        stored: SimpleQueue[Any] = SimpleQueue()
        log.cursors.advance("worker", lease.token, 100, stored.put)
        assert stored.get(timeout=20) is None
        wait_until(lambda: log.low_water() == 90)


def test_configured_retention_passes_a_durable_cursor_when_requested(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.05)
    with opened(path, retain_events=10, retain_ignore_cursors=True) as log:
        log.cursors.claim("worker", ["**"], 40)
        append(log, [row(n) for n in range(100)])

        wait_until(lambda: log.low_water() == 90)


# A number of events


@pytest.mark.parametrize("burst", [1, 1500])
def test_a_configured_number_of_events_is_kept_below_a_block_too(path: Path, burst: int) -> None:
    with opened(path, retain_events=1000) as log:
        for start in range(0, 1500, burst):
            append(log, [row(start + n) for n in range(burst)])

        wait_until(lambda: 1000 <= log.head() - log.low_water() < 1100, deadline_s=5.0)


# Clocks

DAY_NS = 86_400 * 1_000_000_000


@pytest.mark.parametrize("sealed", [False, True])
def test_one_event_from_the_future_does_not_stop_age_retention(path: Path, log: SqliteLog, sealed: bool) -> None:
    now, size = time.time_ns(), 2 * BLOCK + 50 if sealed else 100
    append(log, [row(n, at_ns=now + 365 * DAY_NS if n == 20 else now - 2 * DAY_NS) for n in range(size)])
    append(log, [row(size + n, at_ns=now - n) for n in range(10)])
    wait_until(lambda: not sealed or ask(path, "SELECT count(*) FROM blocks") >= 2)

    assert log.prune(Rules(max_age_s=86_400)).low_water == size
    assert offsets(log) == list(range(size + 1, size + 11))


def test_an_event_from_the_future_stays_as_long_as_the_event_after_it(log: SqliteLog) -> None:
    now = time.time_ns()
    ages = [2 * DAY_NS, 2 * DAY_NS, -365 * DAY_NS, 0, -365 * DAY_NS]
    append(log, [row(n, at_ns=now - age) for n, age in enumerate(ages)])

    log.prune(Rules(max_age_s=86_400))

    assert offsets(log) == [3, 4, 5]


def test_events_from_the_future_alone_are_kept(log: SqliteLog) -> None:
    now = time.time_ns()
    append(log, [row(n, at_ns=now + 365 * DAY_NS) for n in range(10)])

    assert log.prune(Rules(max_age_s=86_400)).removed == 0


@pytest.mark.parametrize("reopened", [False, True])
def test_a_clock_that_jumps_a_year_ahead_does_not_empty_the_log(
    path: Path, reopened: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.05)
    now = time.time_ns()
    log = open_log(BusConfig(log=str(path), retain_age_s=86_400))
    append(log, [row(n, at_ns=now - 2 * DAY_NS + n) for n in range(100)])
    append(log, [row(100 + n, at_ns=now - 1000 + n) for n in range(100)])
    wait_until(lambda: log.low_water() == 100)

    if reopened:
        log.close(5.0)
    ahead = 365 * DAY_NS
    monkeypatch.setattr("time.time_ns", lambda: now + ahead)
    if reopened:
        log = open_log(BusConfig(log=str(path), retain_age_s=86_400))
    append(log, [row(200, at_ns=now + ahead)])
    wait_until(lambda: "LOG_CLOCK_JUMPED" in caplog.text)
    time.sleep(0.3)

    assert len(offsets(log)) == 101
    (report,) = [each.zbus for each in caplog.records if "LOG_CLOCK_JUMPED" in each.message]  # type: ignore[attr-defined]
    assert report["code"] == "clock_jumped"
    assert abs(report["ahead_s"] - 365 * 86_400) < 86_400
    log.close(5.0)


@pytest.mark.parametrize("set_right", [False, True])
def test_a_restart_does_not_make_a_wrong_clock_right_however_many_events_it_has_published(
    path: Path, set_right: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.05)
    now, ahead = time.time_ns(), 365 * DAY_NS
    with opened(path, retain_age_s=86_400) as log:
        append(log, [row(n, at_ns=now - 1000 + n) for n in range(100)])
        monkeypatch.setattr("time.time_ns", lambda: now + ahead)
        append(log, [row(100 + n, at_ns=now + ahead + n) for n in range(1000)])
        wait_until(lambda: "LOG_CLOCK_JUMPED" in caplog.text)
    caplog.clear()

    if set_right:
        monkeypatch.setattr("time.time_ns", lambda: now)
    with opened(path, retain_age_s=86_400) as log:
        time.sleep(0.3)
        assert len(offsets(log)) == 1100
    assert ("LOG_CLOCK_JUMPED" in caplog.text) == (not set_right)


def test_a_clock_that_jumps_does_not_forget_the_identities_of_removed_events(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus_log.write.writer.IDLE_S", 0.05)
    now = time.time_ns()
    with opened(path, retain_events=10) as log:
        append(log, [row(n, at_ns=now) for n in range(100)])
        wait_until(lambda: log.low_water() == 90)
        monkeypatch.setattr("time.time_ns", lambda: now + 365 * DAY_NS)
        time.sleep(0.3)
        append(log, [row(n, at_ns=now) for n in range(100)])

        assert log.head() == 100


def test_the_error_of_a_trimmed_read_names_the_current_low_water_mark(log: SqliteLog) -> None:
    append(log, [row(n) for n in range(10)])
    for until in (2, 3, 7):  # the reader remembers the first one
        log.prune(Rules(until=until))
        with pytest.raises(LogTrimmed) as error:
            log.read(EVERYTHING, Span(1), 10)
        assert error.value.low_water == until
