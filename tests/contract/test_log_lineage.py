"""The log port: its incarnations, and the digest of its history."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from log_contract import KINDS, WAIT_S, Logs, append, rows, wait_until

from zbus.errors import LogError
from zbus.ports.log import AppendResult, Log

ID_MAX = (1 << 62) - 1


@pytest.fixture
def another(request: pytest.FixtureRequest, tmp_path: Path, logs: Logs) -> Iterator[Log]:
    """A log of the same kind with a history of its own."""
    folder = tmp_path / "another"
    folder.mkdir()
    others = KINDS[request.node.callspec.params["logs"]](folder)
    yield others.open()
    others.close()


def test_a_new_log_is_in_its_first_incarnation(log: Log) -> None:
    (only,) = log.lineage.incarnations

    assert 0 < only.id <= ID_MAX
    assert only.first == 1
    assert abs(only.started_at - time.time_ns()) < 60e9
    assert log.lineage.current == only


def test_each_opening_is_one_more_incarnation_from_the_next_offset(logs: Logs, log: Log) -> None:
    known = log.lineage.incarnations
    for number in range(3):
        last = append(log, rows(5, start=number * 5)).offsets[-1]
        log.close(5.0)
        log = logs.open()
        found = log.lineage.incarnations
        if log.promise.durability == "nothing":
            assert len(found) == 1
            assert found[0].id not in {each.id for each in known}
            continue
        assert found[:-1] == known
        assert found[-1].first == last + 1
        assert append(log, rows(1, publisher=9, start=number)).offsets[0] >= found[-1].first
        known = found

    assert len({each.id for each in known}) == len(known)


def test_an_opening_that_stores_nothing_is_an_incarnation_too(logs: Logs, log: Log) -> None:
    before = log.lineage.incarnations
    log.close(5.0)
    again = logs.open()

    if again.promise.durability != "nothing":
        assert again.lineage.incarnations[:-1] == before
        assert again.lineage.current.first == before[-1].first == 1


def test_the_lineage_does_not_change_while_events_are_stored(log: Log) -> None:
    before = log.lineage
    append(log, rows(50))

    assert log.lineage == before


def test_a_reader_sees_the_incarnations_of_the_owner_and_begins_none(logs: Logs, log: Log) -> None:
    append(log, rows(3))
    reader = logs.reader()
    if reader is None:
        assert log.promise.durability == "nothing"
        return
    wait_until(lambda: reader.lineage == log.lineage)
    begun = log.begin_incarnation()

    wait_until(lambda: reader.lineage.current == begun)
    assert reader.lineage == log.lineage
    with pytest.raises(LogError):
        reader.begin_incarnation()
    assert log.lineage.current == begun


def test_an_incarnation_that_begins_while_the_log_is_open_comes_after_what_was_appended(log: Log) -> None:
    answers: SimpleQueue[AppendResult] = SimpleQueue()
    before = log.lineage
    for number in range(20):
        log.append(rows(1, start=number), answers.put, None)
    begun = log.begin_incarnation()
    last = max(answers.get(timeout=WAIT_S).outcome.offsets[0] for _ in range(20))  # type: ignore[union-attr]
    after = append(log, rows(1, start=20)).offsets[0]

    assert begun.first == last + 1
    assert after >= begun.first
    assert log.lineage.incarnations == (*before.incarnations, begun)
    assert log.lineage.until(before.current.id) == last
    assert log.lineage.of(last) == before.current.id
    assert log.lineage.of(after) == begun.id


def test_an_incarnation_that_began_while_the_log_was_open_is_kept(logs: Logs, log: Log) -> None:
    log.begin_incarnation()
    before = log.lineage.incarnations
    log.close(5.0)
    again = logs.open()

    if again.promise.durability != "nothing":
        assert again.lineage.incarnations[:-1] == before


def test_the_digest_is_the_same_for_the_same_events_and_does_not_depend_on_later_ones(logs: Logs, log: Log) -> None:
    digests: dict[int, bytes] = {}
    for number in range(10):
        last = append(log, rows(7, start=number * 7)).offsets[-1]
        digests[last] = log.digest(last)
    again = {offset: log.digest(offset) for offset in digests}
    reader = logs.reader()

    assert again == digests
    assert len(set(digests.values())) == len(digests)
    assert all(digests.values())
    if reader is not None:
        assert {offset: reader.digest(offset) for offset in digests} == digests


def test_the_digest_differs_if_an_earlier_event_differs(log: Log, another: Log) -> None:
    same = rows(5)
    offsets = append(log, same).offsets
    other = append(another, same).offsets
    if list(offsets) == list(other) and log.promise.writers == "one":
        assert log.digest(offsets[-1]) == another.digest(other[-1])
    append(log, rows(1, publisher=8))
    append(another, rows(1, publisher=9))
    offset = append(log, rows(1, start=5)).offsets[0]
    append(another, rows(1, start=5))

    assert log.digest(offset) != another.digest(offset)
    assert log.digest(offset)


def test_the_digest_of_an_offset_that_is_not_stored_yet_is_unknown(log: Log) -> None:
    last = append(log, rows(5)).offsets[-1]

    assert log.digest(last)
    assert log.digest(last + 1000) == b""


def test_the_digest_survives_a_restart_and_begins_no_other_chain(logs: Logs, log: Log, another: Log) -> None:
    batch = rows(20)
    append(log, batch[:10])
    middle = log.digest(log.head())
    at = log.head()
    log.close(5.0)
    again = logs.open()
    if again.promise.durability == "nothing":
        return
    assert again.digest(at) == middle
    last = append(again, batch[10:]).offsets[-1]
    if again.promise.writers == "one":
        append(another, batch[:10])
        append(another, batch[10:])
        assert again.digest(last) == another.digest(last)


def test_retention_does_not_change_the_digest(logs: Logs, log: Log) -> None:
    offsets = append(log, rows(50)).offsets
    before = log.digest(offsets[-1])
    logs.trim(log, offsets[20])

    assert log.digest(offsets[-1]) == before
    last = append(log, rows(1, start=50)).offsets[0]
    newest = log.digest(last)
    assert newest not in (before, b"")
    log.close(5.0)
    again = logs.open()
    if again.promise.durability != "nothing":
        assert again.digest(offsets[-1]) == before
        assert again.digest(last) == newest
