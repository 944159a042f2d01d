"""The log port: durable positions by name, and leases with tokens."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import Any

import pytest
from log_contract import WAIT_S, Logs, append, rows, wait_until
from mesh_fakes import recorded

from zbus.errors import CursorError, LogError, ZbusError
from zbus.ports.log import Log


@pytest.fixture
def log(logs: Logs) -> Log:
    """A log with 1,000 events."""
    found = logs.open()
    append(found, rows(1000))
    wait_until(lambda: found.head() >= 1000)
    return found


def advance(log: Log, name: str, token: str, offset: int) -> None:
    """Advance, and wait until it is stored; raises if it is not."""
    answers: SimpleQueue[ZbusError | None] = SimpleQueue()
    log.cursors.advance(name, token, offset, answers.put)
    error = answers.get(timeout=WAIT_S)
    if error is not None:
        raise error


def positions(log: Log) -> dict[str, int]:
    return {cursor.name: cursor.offset for cursor in log.cursors.list()}


def test_a_new_name_starts_where_it_should_and_a_known_one_where_it_stopped(log: Log) -> None:
    token, offset, _ = log.cursors.claim("worker", ["a/**"], 7)
    advance(log, "worker", token, 20)
    log.cursors.release("worker", token)

    assert offset == 7
    assert log.cursors.claim("worker", ["a/**"], 0).offset == 20


def test_a_lease_says_under_which_keys_its_position_was_reached(log: Log) -> None:
    for keys, before in ((["a/**"], ()), (["a/**", "b"], ("a/**",)), (["c"], ("a/**", "b"))):
        lease = log.cursors.claim("worker", keys, 0)
        log.cursors.release("worker", lease.token)
        assert lease.keys == before


def test_a_name_has_one_holder(log: Log) -> None:
    log.cursors.claim("worker", ["**"], 0)

    with pytest.raises(CursorError) as caught:
        log.cursors.claim("worker", ["**"], 0)

    (cursor,) = log.cursors.list()
    assert cursor.owner is not None
    assert cursor.owner in caught.value.reason
    assert log.cursors.claim("another", ["**"], 3).offset == 3


def test_of_many_that_claim_at_once_one_gets_the_name(log: Log) -> None:
    outcomes: SimpleQueue[bool] = SimpleQueue()
    start = threading.Barrier(4)

    def claim() -> None:
        start.wait(WAIT_S)
        try:
            log.cursors.claim("worker", ["**"], 0)
            outcomes.put(True)
        except CursorError:
            outcomes.put(False)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes.get_nowait() for _ in range(4)) == [False, False, False, True]


def test_other_processes_see_the_holder_and_cannot_take_its_name(logs: Logs, log: Log) -> None:
    log.cursors.claim("worker", ["**"], 0)
    reader = logs.reader()
    if reader is None:
        assert log.promise.durability == "nothing"
        return

    with pytest.raises(CursorError):
        reader.cursors.claim("worker", ["**"], 0)
    assert [cursor.owner for cursor in reader.cursors.list()] == [log.cursors.list()[0].owner]


def test_each_claim_has_a_token_of_its_own(log: Log) -> None:
    tokens = []
    for _ in range(3):
        tokens.append(log.cursors.claim("worker", ["**"], 0).token)
        log.cursors.release("worker", tokens[-1])

    assert len(set(tokens)) == 3
    assert all(tokens)


def test_a_position_never_goes_back_and_each_advance_is_answered(log: Log) -> None:
    token, _, _ = log.cursors.claim("worker", ["**"], 10)
    for offset in (12, 11, 30, 5, 29):
        advance(log, "worker", token, offset)
        log.cursors.advance("worker", token, offset - 5)
    log.cursors.release("worker", token)

    assert positions(log) == {"worker": 30}


def test_the_lease_of_a_holder_that_is_gone_can_be_claimed(logs: Logs, log: Log) -> None:
    token, _, _ = log.cursors.claim("worker", ["**"], 0)
    advance(log, "worker", token, 5)
    logs.let_the_holder_be_gone(log)

    assert log.cursors.list()[0].owner is None
    assert log.cursors.claim("worker", ["**"], 0).offset == 5


def test_a_late_acknowledgement_with_an_old_token_is_refused_and_recorded(logs: Logs, log: Log) -> None:
    old, _, _ = log.cursors.claim("worker", ["**"], 4)
    logs.let_the_holder_be_gone(log)
    new, _, _ = log.cursors.claim("worker", ["**"], 0)
    advance(log, "worker", new, 6)

    with recorded() as records, pytest.raises(CursorError) as caught:
        advance(log, "worker", old, 9)
    log.cursors.release("worker", old)

    assert caught.value.name == "worker"
    assert positions(log) == {"worker": 6}
    assert log.cursors.list()[0].owner is not None
    assert [(r["level"], r["durable"], r["code"]) for r in records if r["record"] == "LEASE_LOST"] == [
        (logging.WARNING, "worker", "lease_lost")
    ]
    advance(log, "worker", new, 7)
    assert positions(log) == {"worker": 7}


def test_an_acknowledgement_after_the_release_is_refused(log: Log) -> None:
    token, _, _ = log.cursors.claim("worker", ["**"], 4)
    log.cursors.release("worker", token)

    with pytest.raises(CursorError):
        advance(log, "worker", token, 9)
    assert positions(log) == {"worker": 4}


def test_a_release_stores_what_was_advanced_before_it(log: Log) -> None:
    for offset in range(1, 21):
        token, before, _ = log.cursors.claim("worker", ["**"], 0)
        log.cursors.advance("worker", token, offset)
        log.cursors.release("worker", token)
        assert before == offset - 1
        assert positions(log) == {"worker": offset}


@pytest.mark.parametrize("name", ["", "x" * 201, "line\nbreak", "nul\x00", 5, None])
def test_a_name_that_cannot_be_typed_is_refused(log: Log, name: Any) -> None:
    with pytest.raises(CursorError):
        log.cursors.claim(name, ["**"], 0)

    assert list(log.cursors.list()) == []


def test_cursors_are_listed_by_name_with_their_expressions(log: Log) -> None:
    assert list(log.cursors.list()) == []
    leases = {name: log.cursors.claim(name, [f"{name}/**", "x"], at) for name, at in (("b", 2), ("a", 1))}
    log.cursors.release("b", leases["b"].token)

    found = log.cursors.list()

    assert [(c.name, c.offset, c.keys, c.owner is None) for c in found] == [
        ("a", 1, ("a/**", "x"), False),
        ("b", 2, ("b/**", "x"), True),
    ]
    assert all(cursor.updated_at_ns > 0 for cursor in found)


def test_a_name_that_is_not_in_use_can_be_moved_either_way_and_deleted(log: Log) -> None:
    log.cursors.release("worker", log.cursors.claim("worker", ["**"], 50).token)

    for position in (2, 900):
        log.cursors.reset("worker", position)
        assert positions(log) == {"worker": position}
    log.cursors.delete("worker")

    assert positions(log) == {}
    assert log.cursors.claim("worker", ["**"], 8).offset == 8


def test_a_name_in_use_is_neither_moved_nor_deleted_and_an_unknown_one_is_an_error(log: Log) -> None:
    log.cursors.claim("worker", ["**"], 5)

    for name in ("worker", "nobody"):
        with pytest.raises(CursorError):
            log.cursors.reset(name, 0)
        with pytest.raises(CursorError):
            log.cursors.delete(name)
    assert positions(log) == {"worker": 5}


def test_positions_survive_a_restart_if_the_log_does(logs: Logs, log: Log) -> None:
    token, _, _ = log.cursors.claim("worker", ["**"], 0)
    advance(log, "worker", token, 42)
    log.close(5.0)
    again = logs.open()
    if again.promise.durability == "nothing":
        assert positions(again) == {}
        return
    assert positions(again) == {"worker": 42}


def test_an_advance_after_the_close_says_that_it_was_not_stored(log: Log) -> None:
    token, _, _ = log.cursors.claim("worker", ["**"], 0)
    log.close(5.0)

    with pytest.raises(LogError, match="closed"):
        advance(log, "worker", token, 5)
