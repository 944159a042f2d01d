"""The log port: its promise, its identity, what is kept beside the events, and its end."""

from __future__ import annotations

import time

import pytest
from log_contract import Logs, append, rows

from zbus.errors import LogError
from zbus.ports.log import Log, Promise, Schema


def schema(expression: str, version: int, mode: str = "strict") -> Schema:
    return Schema(expression, version, mode, f"hash of {expression} {version}", {"type": "object"}, 1_000 + version)


def test_the_promise_is_data_that_people_can_read(log: Log) -> None:
    promise = log.promise

    assert isinstance(promise, Promise)
    assert promise.durability in ("power loss", "a crash of the process", "nothing")
    assert promise.writers in ("one", "many")
    assert isinstance(promise.dense, bool)
    assert promise.identities
    assert promise.atomic_events is None or promise.atomic_events >= 1
    assert log.promise == promise


def test_the_ids_of_the_history_and_of_the_writer_are_odd_and_fit_into_62_bits(logs: Logs, log: Log) -> None:
    """Odd ids say to other nodes that there is a log to ask."""
    for number in (log.log_id, log.writer_id):
        assert 0 < number < 1 << 62
        assert number % 2 == 1
    assert (log.log_id == log.writer_id) == (log.promise.writers == "one")


def test_the_ids_are_the_same_after_a_restart_if_the_log_is(logs: Logs, log: Log) -> None:
    before = log.log_id, log.writer_id
    append(log, rows(3))
    log.close(5.0)
    again = logs.open()

    assert ((again.log_id, again.writer_id) == before) == (again.promise.durability != "nothing")


def test_positions_are_stored_by_name_and_survive_with_the_log(logs: Logs, log: Log) -> None:
    assert log.positions.load() == {}
    log.positions.store({"from/a": 3, "sent/hall": 1 << 62})
    log.positions.store({"from/a": 9})
    expected = {"from/a": 9, "sent/hall": 1 << 62}
    assert log.positions.load() == expected
    log.close(5.0)
    again = logs.open()

    assert again.positions.load() == (expected if again.promise.durability != "nothing" else {})


def test_each_writer_has_positions_of_its_own(logs: Logs, log: Log) -> None:
    log.positions.store({"from/a": 3})
    if log.promise.writers == "many":
        assert logs.another_writer().positions.load() == {}


def test_every_version_of_a_schema_is_kept_in_order(logs: Logs, log: Log) -> None:
    assert list(log.schemas.load()) == []
    for each in (schema("b/**", 1), schema("a/**", 1), schema("b/**", 2, "removed"), schema("b/**", 3)):
        log.schemas.store(each)
    expected = [schema("a/**", 1), schema("b/**", 1), schema("b/**", 2, "removed"), schema("b/**", 3)]
    assert list(log.schemas.load()) == expected
    log.close(5.0)
    again = logs.open()

    assert list(again.schemas.load()) == (expected if again.promise.durability != "nothing" else [])


def test_a_log_that_is_only_read_keeps_no_schema(logs: Logs, log: Log) -> None:
    append(log, rows(1))
    reader = logs.reader()
    if reader is None:
        assert log.promise.durability == "nothing"
        return
    with pytest.raises(LogError):
        reader.schemas.store(schema("a/**", 1))
    assert list(reader.schemas.load()) == []


def test_the_size_is_at_least_that_of_what_is_stored(log: Log) -> None:
    batch = rows(2000)
    append(log, batch)

    assert log.size_bytes() >= sum(len(row.payload) for row in batch)


def test_diagnostics_say_where_the_log_is_and_how_far(log: Log) -> None:
    append(log, rows(3))
    reported = log.diagnostics()

    assert reported["log"] == log.path
    assert {"head", "low_water", "read_only"} <= reported.keys()


def test_closing_is_bounded_and_may_be_repeated(log: Log) -> None:
    append(log, rows(100))
    began = time.monotonic()
    log.close(5.0)
    log.close(5.0)

    assert time.monotonic() - began < 10.0
