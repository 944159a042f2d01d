"""The log port: what an append promises, in every log."""

from __future__ import annotations

import threading
from itertools import pairwise
from queue import SimpleQueue

import pytest
from fake_log import Fault
from log_contract import WAIT_S, FakeLogs, Logs, append, follow, outcome_of, rows
from msgspec.structs import replace

from zbus.errors import LogError, LogReadOnly
from zbus.ports.log import AppendResult, Log, Refused, Stored, Unknown


def identities(log: Log, until: int) -> list[tuple[int, int]]:
    return [event.identity for event in follow(log, until)]


def test_each_row_gets_an_offset_and_they_rise_in_the_order_of_the_rows(log: Log) -> None:
    offsets = [offset for count in (1, 5, 2, 40) for offset in append(log, rows(count, publisher=count)).offsets]

    assert offsets[0] > 0
    assert all(before < after for before, after in pairwise(offsets))
    if log.promise.dense:
        assert offsets == list(range(1, 1 + len(offsets)))


def test_appends_are_answered_once_each_with_what_their_caller_passed(log: Log) -> None:
    answers: SimpleQueue[AppendResult] = SimpleQueue()
    for number in range(50):
        log.append(rows(1, start=number), answers.put, f"about {number}")
    found = [answers.get(timeout=WAIT_S) for _ in range(50)]

    assert [answer.about for answer in found] == [f"about {number}" for number in range(50)]
    assert all(isinstance(answer.outcome, Stored) for answer in found)
    assert answers.empty()


def test_what_is_acknowledged_can_be_read_as_it_was_appended(log: Log) -> None:
    batch = rows(30)
    offsets = append(log, batch).offsets

    found = follow(log, offsets[-1])

    assert [event.offset for event in found] == list(offsets)
    assert [(e.publisher_id, e.sequence, e.published_at, e.key, e.payload) for e in found] == [
        (r.publisher_id, r.sequence, r.published_at, r.key, r.payload) for r in batch
    ]
    assert {event.provenance for event in found} == {None}


def test_the_same_identity_is_stored_once_and_answered_with_the_first_offset(log: Log) -> None:
    first = append(log, rows(10))
    again = append(log, rows(12))

    assert list(first.repeated) == []
    assert list(again.offsets[:10]) == list(first.offsets)
    assert set(again.repeated) == set(range(10))
    assert identities(log, again.offsets[-1]) == [(7, n) for n in range(12)]


def test_the_same_identity_twice_in_one_append_is_stored_once(log: Log) -> None:
    stored = append(log, [*rows(2), *rows(1), *rows(1, start=2)])

    assert stored.offsets[2] == stored.offsets[0]
    assert set(stored.repeated) == {2}
    assert identities(log, max(stored.offsets)) == [(7, 0), (7, 1), (7, 2)]


def test_an_identity_is_known_as_long_as_the_log_promises(logs: Logs, log: Log) -> None:
    offsets = append(log, rows(3)).offsets
    if isinstance(logs, FakeLogs):
        logs.history.pass_time(119.0)
        assert list(append(log, rows(3)).offsets) == list(offsets)
        logs.history.pass_time(10.0)
    again = append(log, rows(3))

    if log.promise.identities.startswith("as long as its event"):
        assert list(again.offsets) == list(offsets)
    else:
        assert log.promise.identities == "2 minutes"
        assert min(again.offsets) > max(offsets)


def test_another_event_under_a_stored_identity_is_a_conflict_and_is_not_stored(log: Log) -> None:
    first = append(log, rows(5))
    same, key, payload = rows(3, start=1)
    again = append(
        log,
        [same, replace(key, key="shop/refunds"), replace(payload, payload=b"changed"), *rows(1, start=5)],
    )

    assert set(again.repeated) == {0, 1, 2}
    assert dict(again.conflicts) == {1: "shop/orders", 2: "shop/orders"}
    assert list(again.offsets[:3]) == list(first.offsets[1:4])
    found = follow(log, again.offsets[-1])
    assert [(event.key, event.payload) for event in found] == [("shop/orders", b"%d of 7" % n) for n in range(6)]


def test_the_same_event_with_other_headers_or_another_time_is_a_repetition(log: Log) -> None:
    append(log, rows(1))
    again = append(log, [replace(rows(1)[0], published_at=5, headers=b"\x81\xa1a\xa1b")])

    assert (set(again.repeated), dict(again.conflicts)) == ({0}, {})


def test_two_events_under_one_identity_in_one_append_are_a_conflict(log: Log) -> None:
    one = rows(1)[0]
    stored = append(log, [one, replace(one, payload=b"other"), one, replace(one, key="a"), *rows(1, publisher=8)])

    assert stored.offsets[:4] == [stored.offsets[0]] * 4
    assert set(stored.repeated) == {1, 2, 3}
    assert dict(stored.conflicts) == {1: "shop/orders", 3: "shop/orders"}
    assert [event.payload for event in follow(log, stored.offsets[-1])] == [b"0 of 7", b"0 of 8"]


def test_an_empty_payload_and_one_that_begins_alike_are_compared_in_full(log: Log) -> None:
    one = rows(1)[0]
    append(log, [replace(one, payload=b""), replace(one, sequence=1, payload=b"ab")])
    again = append(
        log,
        [
            replace(one, payload=b""),
            replace(one, sequence=1, payload=b"ab"),
            replace(one, payload=b"x"),
            replace(one, sequence=1, payload=b"a"),
            replace(one, sequence=1, payload=b""),
        ],
    )

    assert set(again.conflicts) == {2, 3, 4}


def test_an_event_that_retention_removed_is_known_by_its_identity(logs: Logs, log: Log) -> None:
    offsets = append(log, rows(10)).offsets
    logs.trim(log, offsets[5])
    again = append(log, [*rows(3), *rows(2, start=9), *rows(1, publisher=8)])

    assert set(again.repeated) == {0, 1, 2, 3}
    assert max(again.offsets[:3]) <= log.low_water() == offsets[5]
    assert again.offsets[3] == offsets[9]
    assert dict(again.conflicts) == {}
    assert identities(log, again.offsets[-1]) == [(7, 6), (7, 7), (7, 8), (7, 9), (7, 10), (8, 0)]


def test_a_sequence_that_was_skipped_is_stored_even_after_retention(logs: Logs, log: Log) -> None:
    offsets = append(log, [*rows(3), *rows(3, start=5)]).offsets
    logs.trim(log, offsets[-1])
    again = append(log, rows(7))

    assert set(again.repeated) == {0, 1, 2, 5, 6}
    assert identities(log, max(again.offsets)) == [(7, 3), (7, 4)]


def test_appends_of_many_threads_are_all_stored_and_the_order_of_each_is_kept(log: Log) -> None:
    answers: SimpleQueue[AppendResult] = SimpleQueue()

    def run(publisher: int) -> None:
        for number in range(40):
            log.append(rows(3, publisher, 3 * number), answers.put, None)

    threads = [threading.Thread(target=run, args=(publisher,)) for publisher in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes = [answers.get(timeout=WAIT_S).outcome for _ in range(120)]
    stored = [outcome for outcome in outcomes if isinstance(outcome, Stored)]
    found = identities(log, max(offset for each in stored for offset in each.offsets))

    assert len(stored) == 120
    assert len(found) == 360
    for publisher in (1, 2, 3):
        assert [sequence for by, sequence in found if by == publisher] == list(range(120))


def test_what_was_acknowledged_is_there_after_a_restart_if_the_log_promises_that(logs: Logs, log: Log) -> None:
    offsets = append(log, rows(20)).offsets
    log.close(5.0)
    with_log = logs.open()

    if with_log.promise.durability == "nothing":
        assert with_log.head() == 0
    else:
        assert identities(with_log, offsets[-1]) == [(7, n) for n in range(20)]
        again = append(with_log, rows(21))
        assert list(again.offsets[:20]) == list(offsets)
        assert again.offsets[20] > offsets[-1]


def test_an_append_to_a_closed_log_is_refused(log: Log) -> None:
    log.close(5.0)

    outcome = outcome_of(log, rows(1))

    assert isinstance(outcome, Refused)
    assert "closed" in str(outcome.error)


def test_an_append_to_a_log_that_is_only_read_is_refused(logs: Logs, log: Log) -> None:
    append(log, rows(1))
    reader = logs.reader()
    if reader is None:
        assert log.promise.durability == "nothing"
        return

    outcome = outcome_of(reader, rows(1, start=1))

    assert reader.read_only
    assert isinstance(outcome, Refused)
    assert isinstance(outcome.error, LogReadOnly)
    assert identities(log, append(log, rows(1, start=2)).offsets[0]) == [(7, 0), (7, 2)]


def test_closing_stores_what_was_appended_before(logs: Logs, log: Log) -> None:
    answers: SimpleQueue[AppendResult] = SimpleQueue()
    for number in range(100):
        log.append(rows(1, start=number), answers.put, None)
    log.close(5.0)

    outcomes = [answers.get_nowait().outcome for _ in range(100)]

    assert all(isinstance(outcome, Stored) for outcome in outcomes)


# Outcomes. SQLite's own are in tests/zbus_log/test_append.py, with a disk that fails.


@pytest.fixture
def fakes() -> FakeLogs:
    return FakeLogs(None)  # type: ignore[arg-type]


def test_a_refused_append_has_stored_nothing(fakes: FakeLogs) -> None:
    log = fakes.open()
    log.faults.append("refused")
    outcome = outcome_of(log, rows(5))
    after = append(log, rows(1, start=9))
    log.close(5.0)

    assert isinstance(outcome, Refused)
    assert [entry.row.sequence for entry in fakes.history.entries] == [9]
    assert list(after.repeated) == []


@pytest.mark.parametrize(
    ("fault", "stored_before"), [("stored, answer lost", 150), ("lost", 0), ("stored in part, answer lost", 100)]
)
def test_appending_again_after_an_unknown_outcome_stores_each_event_once(
    fakes: FakeLogs, fault: Fault, stored_before: int
) -> None:
    log = fakes.open()
    log.faults.append(fault)
    outcome = outcome_of(log, rows(150))
    between = len(fakes.history.entries)
    again = append(log, rows(150))
    found = follow(log, again.offsets[-1])
    log.close(5.0)

    assert isinstance(outcome, Unknown)
    assert isinstance(outcome.error, LogError)
    assert between == stored_before
    assert set(again.repeated) == set(range(stored_before))
    assert [event.sequence for event in found] == list(range(150))


def test_an_append_up_to_the_promised_number_is_stored_whole_or_not_at_all(fakes: FakeLogs) -> None:
    log = fakes.open()
    atomic = log.promise.atomic_events
    assert atomic is not None
    log.faults.append("stored in part, answer lost")
    outcome_of(log, rows(atomic))
    log.close(5.0)

    assert len(fakes.history.entries) == atomic
