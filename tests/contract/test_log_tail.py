"""The log port: the tail has every event once, in the order of offsets, before its append is answered."""

from __future__ import annotations

import threading
from itertools import pairwise
from queue import SimpleQueue

from fake_log import FakeLane
from log_contract import WAIT_S, FakeLogs, Logs, append, follow, rows, wait_until

from zbus.ports.log import AppendResult, Committed, Log, Row


class Tail:
    """The events that a tail received."""

    def __init__(self, log: Log) -> None:
        self.rows: list[Row] = []
        self.offsets: list[int] = []
        self.after = log.tail(self.take)

    def take(self, committed: Committed) -> None:
        assert len(committed.rows) == len(committed.offsets) > 0
        self.rows += committed.rows
        self.offsets += committed.offsets

    @property
    def sequences(self) -> list[int]:
        return [row.sequence for row in self.rows]


def test_the_tail_of_an_empty_log_begins_at_the_beginning(log: Log) -> None:
    assert Tail(log).after == 0


def test_the_tail_begins_after_the_offset_that_it_returns(log: Log) -> None:
    before = append(log, rows(100)).offsets
    tail = Tail(log)
    after = append(log, rows(100, start=100)).offsets

    assert tail.after == before[-1]
    assert tail.offsets == list(after)
    assert tail.sequences == list(range(100, 200))


def test_the_tail_has_an_event_before_its_append_is_answered(log: Log) -> None:
    tail = Tail(log)
    seen: SimpleQueue[tuple[int, ...]] = SimpleQueue()
    for number in range(200):
        log.append(rows(1, start=number), lambda answer: seen.put(tuple(tail.offsets)), None)
    at_the_answers = [seen.get(timeout=WAIT_S) for _ in range(200)]

    assert all(len(offsets) > number for number, offsets in enumerate(at_the_answers))
    assert tail.sequences == list(range(200))
    assert all(before < after for before, after in pairwise(tail.offsets))


def test_what_was_stored_before_is_not_in_the_tail_again(log: Log) -> None:
    append(log, rows(5))
    tail = Tail(log)
    append(log, rows(5))
    append(log, [*rows(6), *rows(7), *rows(7)])

    assert tail.sequences == [5, 6]


def test_the_tail_and_the_pages_have_the_same_events(log: Log) -> None:
    tail = Tail(log)
    for number in range(20):
        append(log, rows(7, publisher=number))

    found = follow(log, tail.offsets[-1])

    assert [event.offset for event in found] == tail.offsets
    assert [event.identity for event in found] == [(row.publisher_id, row.sequence) for row in tail.rows]


def test_a_second_tail_replaces_the_first(log: Log) -> None:
    first = Tail(log)
    append(log, rows(2))
    second = Tail(log)
    append(log, rows(2, start=2))

    assert (first.sequences, second.sequences) == ([0, 1], [2, 3])


def test_the_tail_has_the_events_of_every_writer_in_one_order(logs: Logs, log: Log) -> None:
    if log.promise.writers == "one":
        assert log.log_id == log.writer_id
        return
    other = logs.another_writer()
    assert other.log_id == log.log_id
    assert other.writer_id != log.writer_id
    tails = [Tail(log), Tail(other)]
    answers: SimpleQueue[AppendResult] = SimpleQueue()

    def run(writer: Log, publisher: int) -> None:
        for number in range(50):
            writer.append(rows(2, publisher, 2 * number), answers.put, None)

    threads = [threading.Thread(target=run, args=each) for each in ((log, 1), (other, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(100):
        answers.get(timeout=WAIT_S)

    wait_until(lambda: all(len(tail.offsets) == 200 for tail in tails))
    assert tails[0].offsets == tails[1].offsets == sorted(tails[0].offsets)
    for tail, own, foreign in ((tails[0], 1, (2, other)), (tails[1], 2, (1, log))):
        for publisher in (1, 2):
            assert [row.sequence for row in tail.rows if row.publisher_id == publisher] == list(range(100))
        assert {row.provenance for row in tail.rows if row.publisher_id == own} == {None}
        lanes = {row.provenance.origin for row in tail.rows if row.provenance is not None}
        assert lanes == {foreign[1].writer_id}


def test_an_append_is_answered_after_the_events_of_others_before_it() -> None:
    fakes = FakeLogs(None)  # type: ignore[arg-type]
    log, other = fakes.open(), fakes.another_writer()
    tail = Tail(log)
    append(other, rows(3, publisher=1))
    append(log, rows(1, publisher=2))
    seen = [(row.publisher_id, row.sequence) for row in tail.rows]
    fakes.close()

    assert seen == [(1, 0), (1, 1), (1, 2), (2, 0)]


def test_events_whose_answer_was_lost_are_in_the_tail() -> None:
    fakes = FakeLogs(None)  # type: ignore[arg-type]
    log = fakes.open()
    assert isinstance(log, FakeLane)
    tail = Tail(log)
    log.faults.append("stored, answer lost")
    answers: SimpleQueue[AppendResult] = SimpleQueue()
    log.append(rows(2), answers.put, None)
    answers.get(timeout=WAIT_S)
    fakes.close()

    assert tail.sequences == [0, 1]
