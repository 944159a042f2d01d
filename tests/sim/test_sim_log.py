"""The simulated disk: how it fails, and that retention and damage look as they do with SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from log_contract import EVERYTHING, append, rows
from log_support import raw
from sim_machine import LONG_S, Machine

from zbus import BusConfig
from zbus.errors import (
    CursorError,
    EventCorrupt,
    LogError,
    LogFull,
    LogLocked,
    LogTrimmed,
    LogWriterFailed,
    ZbusError,
)
from zbus.event import Event, Provenance
from zbus.ports.log import AppendResult, Committed, Log, Refused, Row, Schema, Span, Stored, Unknown
from zbus.sim.machine import disk as disk_module
from zbus.sim.machine.log import PRUNE_S, Retention, SimLog
from zbus_log import Rules, SqliteLog, open_log

SEEDS = range(40)


def sequences(log: Log) -> list[int]:
    events, error, _ = log.read(EVERYTHING, Span(), 1000).events()
    assert error is None
    return [event.sequence for event in events]


def received(count: int) -> list[Row]:
    """Rows of another node."""
    return [Row(9, number, 1_000, "shop/orders", b"x", None, Provenance(77, number, (), "")) for number in range(count)]


# A disk that fails.


def test_a_full_disk_refuses_an_append_and_stores_nothing() -> None:
    machine = Machine()
    log = machine.open()
    machine.outcome(log, rows(2))
    machine.disk.full = True
    refused = machine.outcome(log, rows(3, start=2))
    machine.disk.mend()
    after = machine.outcome(log, rows(1, start=9))

    assert isinstance(refused, Refused)
    assert isinstance(refused.error, LogFull)
    assert refused.error.outcome == "refused"
    assert sequences(log) == [0, 1, 9]
    assert isinstance(after, Stored)
    assert list(after.offsets) == [3]


def test_a_full_disk_stores_no_position_and_stores_it_when_there_is_space() -> None:
    machine = Machine()
    log = machine.open()
    token = log.cursors.claim("worker", ["**"], 0).token
    answers: list[ZbusError | None] = []
    machine.disk.full = True
    log.cursors.advance("worker", token, 5, answers.append)
    machine.run()
    failed = [cursor.offset for cursor in log.cursors.list()]
    with pytest.raises(LogFull):
        log.positions.store({"from/a": 1})
    with pytest.raises(LogFull):
        log.schemas.store(Schema("a", 1, "strict", "hash", {}, 1))
    with pytest.raises(LogFull):
        log.cursors.claim("another", ["**"], 0)
    machine.disk.mend()
    machine.run()

    assert isinstance(answers[0], LogFull)
    assert len(answers) == 1
    assert failed == [0]
    assert [cursor.offset for cursor in log.cursors.list()] == [5]
    assert log.positions.load() == {}
    assert list(log.schemas.load()) == []
    assert [cursor.name for cursor in log.cursors.list()] == ["worker"]


def test_a_lease_is_released_although_its_position_cannot_be_stored() -> None:
    machine = Machine()
    log = machine.open()
    token = log.cursors.claim("worker", ["**"], 0).token
    machine.disk.full = True
    log.cursors.advance("worker", token, 5)
    with pytest.raises(LogFull):
        log.cursors.release("worker", token)
    machine.disk.mend()

    assert log.cursors.claim("worker", ["**"], 0).offset == 0


def test_an_unknown_outcome_is_stored_or_not_and_appending_again_stores_it_once() -> None:
    stored: set[bool] = set()
    for seed in SEEDS:
        machine = Machine(seed)
        log = machine.open()
        tail: list[int] = []
        log.tail(lambda committed, tail=tail: tail.extend(committed.offsets))  # type: ignore[misc]
        machine.disk.unknown_p = 1.0
        outcome = machine.outcome(log, rows(3))
        between = sequences(log)
        machine.disk.mend()
        again = machine.outcome(log, rows(4))

        assert isinstance(outcome, Unknown)
        assert outcome.error.outcome == "unknown"
        assert between in ([], [0, 1, 2])
        assert isinstance(again, Stored)
        assert set(again.repeated) == set(between)
        assert sequences(log) == [0, 1, 2, 3]
        assert tail == [1, 2, 3, 4]
        stored.add(bool(between))
    assert stored == {True, False}


def test_a_failed_write_stops_the_writer_until_the_log_is_opened_again() -> None:
    """As SQLite does: after EIO, a retry could acknowledge events that are not on disk."""
    stored: set[bool] = set()
    for seed in SEEDS:
        machine = Machine(seed)
        log = machine.open()
        machine.outcome(log, rows(1))
        machine.disk.broken_p = 1.0
        first = machine.outcome(log, rows(1, start=1))
        machine.disk.mend()
        second = machine.outcome(log, rows(1, start=2))
        found = sequences(log)
        with pytest.raises(LogWriterFailed):
            log.schemas.store(Schema("a", 1, "strict", "hash", {}, 1))
        log.close(5.0)
        again = machine.open()
        third = machine.outcome(again, rows(3))

        assert isinstance(first, Unknown)
        assert isinstance(second, Refused)
        assert isinstance(first.error, LogWriterFailed)
        assert isinstance(second.error, LogWriterFailed)
        assert (first.error.outcome, second.error.outcome) == ("unknown", "refused")
        assert isinstance(third, Stored)
        assert sequences(again) == [0, 1, 2]
        stored.add(found == [0, 1])
        assert found in ([0], [0, 1])
    assert stored == {True, False}


def test_a_refused_commit_stores_nothing() -> None:
    machine = Machine()
    log = machine.open()
    machine.disk.refuse_p = 1.0
    outcome = machine.outcome(log, rows(3))

    assert isinstance(outcome, Refused)
    assert outcome.error.outcome == "refused"
    assert log.head() == 0


def test_a_slow_sync_delays_the_acknowledgement_and_what_waits_shares_the_next_commit() -> None:
    machine = Machine()
    log = machine.open()
    machine.disk.fsync_s = machine.disk.notify_s = (2.0, 2.0)
    answers: list[tuple[int, float]] = []
    batches: list[int] = []
    log.tail(lambda committed: batches.append(len(committed.rows)))
    for number in range(4):
        log.append(rows(1, start=number), lambda result: answers.append((result.about, machine.now)), number)
    machine.run(1.9)
    before = log.head()
    machine.run(10.0)

    assert before == 0
    assert answers == [(0, 4.0), (1, 6.0), (2, 6.0), (3, 6.0)]
    assert batches == [1, 3]
    machine.disk.mend()
    assert machine.disk.fsync_s == disk_module.FSYNC_S


# Processes that end.


def test_a_kill_between_write_and_sync_leaves_all_rows_or_none_and_acknowledges_nothing() -> None:
    found: set[tuple[int, ...]] = set()
    for seed in SEEDS:
        machine = Machine(seed)
        log = machine.open()
        answers: list[AppendResult] = []
        log.append(rows(3), answers.append)
        machine.kill()
        machine.run()
        again = machine.open()
        found.add(tuple(sequences(again)))
        stored = machine.outcome(again, rows(3))

        assert answers == []
        assert isinstance(stored, Stored)
        assert sequences(again) == [0, 1, 2]
    assert found == {(), (0, 1, 2)}


def test_a_kill_between_commit_and_acknowledgement_leaves_the_rows() -> None:
    for power_cut in (False, True):
        machine = Machine()
        log = machine.open()
        answers: list[AppendResult] = []
        machine.disk.point = lambda step, machine=machine, power_cut=power_cut: (  # type: ignore[misc]
            machine.kill(power_cut=power_cut) if step == "committed" else None
        )
        log.append(rows(3), answers.append)
        log.append(rows(1, start=3), answers.append)
        machine.run()

        assert answers == []
        assert sequences(machine.open()) == [0, 1, 2]  # the first commit; the second had not begun


def test_a_power_cut_discards_a_torn_commit_whole_and_keeps_what_was_synced() -> None:
    for seed in SEEDS:
        machine = Machine(seed)
        log = machine.open()
        machine.outcome(log, rows(2))
        for number in range(2, 5):
            log.append(rows(2, start=2 * number), lambda result: pytest.fail("it was not synced"))
        machine.kill(power_cut=True)
        machine.run()

        assert sequences(machine.open()) == [0, 1]


def test_a_power_cut_drops_positions_that_were_not_synced_and_a_kill_does_not() -> None:
    lost: set[bool] = set()
    for seed in SEEDS:
        machine = Machine(seed)
        log = machine.open()
        log.positions.store({"from/a": 1})
        log.close(5.0)
        log = machine.open()
        log.positions.store({"from/a": 2})
        machine.kill()
        after_kill = machine.open().positions.load()
        machine.kill(power_cut=True)
        after_cut = machine.open().positions.load()

        assert after_kill == {"from/a": 2}
        assert after_cut in ({"from/a": 1}, {"from/a": 2})
        lost.add(after_cut == {"from/a": 1})
    assert lost == {True, False}


def test_an_acknowledged_position_of_a_durable_subscription_survives_a_power_cut() -> None:
    machine = Machine()
    log = machine.open()
    machine.outcome(log, rows(6))
    token = log.cursors.claim("worker", ["**"], 0).token
    answers: list[ZbusError | None] = []
    log.cursors.advance("worker", token, 5, answers.append)
    machine.run()
    log.cursors.advance("worker", token, 6, answers.append)
    machine.kill(power_cut=True)
    machine.run()

    assert answers == [None]
    assert machine.open().cursors.claim("worker", ["**"], 0).offset == 5


def test_a_killed_process_holds_no_lease_and_no_lock() -> None:
    machine = Machine()
    log = machine.open(pid=7)
    log.cursors.claim("worker", ["**"], 0)
    with pytest.raises(LogLocked) as caught:
        machine.open(pid=8)
    machine.kill()

    assert (caught.value.pid, caught.value.here) == (7, False)
    assert machine.open(pid=8).cursors.claim("worker", ["**"], 0).offset == 0


@pytest.mark.parametrize("step", ["received", "committed", "position stored", "acknowledged"])
def test_what_a_process_does_in_its_last_step_has_no_effect_after_the_kill(step: str) -> None:
    """A kill at a step happens in the middle of a call, which then runs to its end."""
    for seed in SEEDS:
        machine = Machine(seed)
        log = machine.open()
        token = log.cursors.claim("worker", ["**"], 0).token
        machine.disk.point = lambda at, machine=machine: machine.kill() if at == step else None  # type: ignore[misc]
        log.append(received(2), lambda result: None)
        log.cursors.advance("worker", token, 1)
        machine.run()
        log.positions.store({"from/a": 1})
        machine.disk.point = lambda at: None
        before = machine.disk.copy()
        log.append(rows(1, start=50), lambda result: pytest.fail("the process is dead"))
        log.cursors.advance("worker", token, 99)
        log.cursors.release("worker", token)
        log.positions.store({"from/a": 99})
        log.positions.remove(["from/a"])
        log.cursors.claim("late", ["**"], 0)
        log.close(5.0)
        machine.kill()  # a second process that wrote nothing

        assert machine.disk.rows == before.rows
        assert machine.disk.positions == before.positions
        assert machine.disk.cursors == before.cursors
        assert 50 not in sequences(machine.open())


def test_a_reader_releases_its_leases_and_not_those_of_the_writer() -> None:
    machine = Machine()
    log, reader = machine.open(), machine.open(read_only=True)
    log.cursors.claim("a", ["**"], 0)
    reader.cursors.claim("b", ["**"], 0)
    reader.close(5.0)

    assert [(cursor.name, cursor.owner) for cursor in log.cursors.list()] == [("a", "process 1"), ("b", None)]
    with pytest.raises(CursorError):
        log.cursors.claim("a", ["**"], 0)


def test_a_new_tail_does_not_get_what_was_stored_before_it() -> None:
    machine = Machine()
    log = machine.open()
    machine.disk.notify_s = (1.0, 1.0)
    first: list[Committed] = []
    second: list[Committed] = []
    log.tail(first.append)
    log.append(rows(2), lambda result: None)
    machine.run(0.5)  # stored, and nobody knows yet
    after = log.tail(second.append)
    machine.run(2.0)

    assert after == 2
    assert [list(each.offsets) for each in first] == [[1, 2]]
    assert second == []


# Copies.


def test_a_restored_copy_has_what_it_had_and_gives_the_same_offsets_to_other_events() -> None:
    machine = Machine()
    log = machine.open()
    machine.outcome(log, rows(2))
    token = log.cursors.claim("worker", ["**"], 1).token
    log.positions.store({"from/a": 1})
    copy = machine.disk.copy()
    machine.outcome(log, rows(2, start=2))
    log.positions.store({"from/a": 2})
    log.cursors.advance("worker", token, 4)
    log.close(5.0)
    copied = (copy.head, dict(copy.positions), copy.cursors["worker"].offset)
    machine.disk.full = True
    machine.disk.restore(copy)
    restored_full, machine.disk.full = machine.disk.full, False
    again = machine.open()
    stored = machine.outcome(again, rows(1, start=3))  # it was stored after the copy was made

    assert copied == (2, {"from/a": 1}, 1)  # nothing that followed changed the copy
    assert restored_full  # the disk is the same, only its files are older
    assert again.log_id == log.log_id
    assert isinstance(stored, Stored)
    assert list(stored.offsets) == [3]
    assert sequences(again) == [0, 1, 3]
    assert again.positions.load() == {"from/a": 1}
    assert [(cursor.offset, cursor.owner) for cursor in again.cursors.list()] == [(1, None)]
    assert copy.head == 2


# The same as SQLite.


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqliteLog]:
    log = open_log(BusConfig(log=str(tmp_path / "app.db")))
    yield log
    log.close(5.0)


def shown(log: Log, span: Span, limit: int, skip: bool) -> list[Any]:
    page = log.read(EVERYTHING, span, limit)
    events, error, skipped = page.events(skip_corrupt=skip)
    fields = [(event.offset, *event.identity, event.key, event.payload) for event in events]
    return [fields, page.covered, type(error), error.args if error is not None else (), skipped]


@pytest.mark.parametrize("skip", [False, True])
def test_a_corrupt_event_ends_a_page_or_is_skipped_and_counted_as_with_sqlite(sqlite: SqliteLog, skip: bool) -> None:
    machine = Machine()
    log = machine.open()
    machine.outcome(log, rows(9))
    append(sqlite, rows(9))
    damaged = raw(sqlite.path)
    damaged.execute("DROP TRIGGER events_are_not_updated")
    for offset in (3, 4, 8):
        damaged.execute("UPDATE events SET payload = x'00' WHERE offset = ?", (offset,))
        machine.disk.corrupt.add(offset)
    damaged.close()

    for after in range(10):
        for limit in (1, 3, 100):
            span = Span(after)
            assert shown(log, span, limit, skip) == shown(sqlite, span, limit, skip), (after, limit)
    with_error = log.read(EVERYTHING, Span(), 100).events()
    assert isinstance(with_error[1], EventCorrupt)
    assert [event.offset for event in with_error[0]] == [1, 2]
    assert log.read(EVERYTHING, Span(), 100).events(skip_corrupt=True)[2] == 3


DAY_NS = 86_400 * 10**9


@pytest.mark.parametrize(
    "rules",
    [
        Rules(max_events=4),
        Rules(max_events=0),
        Rules(max_events=100),
        Rules(max_age_s=86_400 * 4.5),
        Rules(max_age_s=0.0),
        Rules(max_age_s=86_400 * 100),
        Rules(max_events=7, max_age_s=86_400 * 2.5),
        Rules(max_events=2, max_age_s=86_400 * 8.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("cursors", [{}, {"a": 9, "b": 3}, {"a": 8, "b": 9}, {"a": 0}], ids=str)
@pytest.mark.parametrize("ignored", [False, True])
def test_retention_removes_what_it_removes_in_sqlite(
    sqlite: SqliteLog, monkeypatch: pytest.MonkeyPatch, rules: Rules, cursors: dict[str, int], ignored: bool
) -> None:
    now_ns = 1_000 * DAY_NS
    batch = [Row(7, number, now_ns - (10 - number) * DAY_NS, "shop/orders", b"x") for number in range(10)]
    batch[6] = Row(7, 6, now_ns - 9 * DAY_NS, "shop/orders", b"x")  # a clock that went back
    monkeypatch.setattr("zbus_log.retention.time.time_ns", lambda: now_ns)
    machine = Machine()
    retention = Retention(rules.max_age_s, rules.max_events, None, ignored)
    log = SimLog(machine.disk, machine.later, lambda: now_ns, machine._chance, retention=retention)
    machine.outcome(log, batch)
    append(sqlite, batch)
    for name, offset in cursors.items():
        for each in (log, sqlite):
            each.cursors.release(name, each.cursors.claim(name, ["**"], offset).token)
    before = log.low_water()
    machine.run(PRUNE_S)
    sqlite.prune(rules._replace(ignore_cursors=ignored))

    assert before == 0  # retention is periodic
    assert log.low_water() == sqlite.low_water()
    assert log.head() == sqlite.head() == 10
    for after in range(11):
        trimmed = []
        for each in (log, sqlite):
            try:
                trimmed.append(shown(each, Span(after), 100, False))
            except LogTrimmed as error:
                trimmed.append(list(error.args))
        assert trimmed[0] == trimmed[1], after


def test_retention_by_size_stops_when_the_log_is_small_enough_and_at_cursors() -> None:
    machine = Machine()
    batch = [Row(7, number, 1_000, "shop/orders", b"x" * 1000) for number in range(100)]
    log = machine.open(retention=Retention(size_bytes=40_000))
    machine.outcome(log, batch)
    token = log.cursors.claim("worker", ["**"], 20).token
    machine.run(PRUNE_S)
    held = log.low_water()
    log.cursors.advance("worker", token, 90)
    machine.run(PRUNE_S)

    assert held == 20
    assert log.size_bytes() <= 40_000
    assert 100 - log.low_water() == 40_000 // 1075  # no more was removed than necessary


def test_an_event_that_retention_removed_is_known_by_its_identity() -> None:
    machine = Machine()
    log = machine.open(retention=Retention(events=2))
    machine.outcome(log, rows(5))
    machine.run(PRUNE_S)
    again = machine.outcome(log, rows(5))

    assert isinstance(again, Stored)
    assert list(again.offsets) == [3, 3, 3, 4, 5]  # the low-water mark, and the offsets of those that are left
    assert set(again.repeated) == {0, 1, 2, 3, 4}


def test_a_version_of_a_schema_is_stored_once(sqlite: SqliteLog) -> None:
    schema = Schema("a/**", 1, "strict", "hash", {}, 1)
    for log in (Machine().open(), sqlite):
        log.schemas.store(schema)
        with pytest.raises(LogError):
            log.schemas.store(schema)
        assert list(log.schemas.load()) == [schema]


def test_a_log_that_is_only_read_has_no_id(sqlite: SqliteLog) -> None:
    machine = Machine()
    log = machine.open()
    append(sqlite, rows(1))
    reader = open_log(BusConfig(log=sqlite.path, read_only=True))
    ids = [each.log_id for each in (machine.open(read_only=True), reader)]
    reader.close(5.0)

    assert ids == [0, 0]
    assert log.log_id % 2 == 1


def test_time_passes_only_as_far_as_a_test_says() -> None:
    """The machine of these tests: a commit takes less than `LONG_S`."""
    machine = Machine()
    log = machine.open()
    found: list[Event] = []
    log.append(rows(1), lambda result: found.append(log.read(EVERYTHING, Span(), 1).events()[0][0]))
    assert found == []
    machine.run(LONG_S)
    assert [event.offset for event in found] == [1]
