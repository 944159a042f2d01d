"""The commit queue: backpressure while too many bytes await commit, and it ends whatever became of the rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest

from zbus.errors import LogError
from zbus.observe.burst_records import BurstRecords
from zbus.observe.records import EVENT_BACKPRESSURE
from zbus.ports.log import Appended, AppendResult, Committed, Log, Refused, Row, Stored
from zbus.publish.backpressure import Backpressure
from zbus.publish.commit_queue import FLUSH_BYTES, CommitQueue
from zbus.util.runtime import REAL

BYTES_MAX = 100


class FakeLog:
    """The test says when rows are stored."""

    path = "fake://log"

    def __init__(self) -> None:
        self.pending: list[tuple[Sequence[Row], Appended, Any]] = []

    def append(self, rows: Sequence[Row], done: Appended, about: Any) -> None:
        self.pending.append((rows, done, about))

    def tail(self, committed: Callable[[Committed], None]) -> None:
        self._committed = committed

    def finish(self, error: LogError | None = None) -> None:
        rows, done, about = self.pending.pop(0)
        offsets = list(range(1, len(rows) + 1))
        if error is None:
            self._committed(Committed(rows, offsets))
        done(AppendResult(about, Stored(offsets) if error is None else Refused(error)))


class Queue:
    """A commit queue over a fake log."""

    def __init__(self) -> None:
        self.log, self.backpressure = FakeLog(), Backpressure(REAL)
        self.counts: list[Any] = []
        self.stored: list[tuple[Sequence[Row], Sequence[int]]] = []
        self.commits = CommitQueue(
            cast("Log", self.log),
            self.backpressure,
            BYTES_MAX,
            [self._stored],
            None,
            lambda name, events: self.counts.append((name, events)),
            BurstRecords(REAL),
            REAL,
        )

    @property
    def blocked(self) -> bool:
        return self.backpressure.applies(lambda reasons: self.commits in reasons)

    def _stored(self, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        self.stored.append((rows, offsets))


def row(size: int) -> Row:
    return Row(1, 0, 1, "a/b", b"x" * size, None)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_publishers_wait_while_more_bytes_than_allowed_await_commit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zbus")
    queue = Queue()
    first = queue.commits.add(row(BYTES_MAX))
    assert not queue.blocked, "as many bytes as allowed are no reason to wait"
    second = queue.commits.add(row(1))
    await settle()
    assert queue.blocked
    waiting = asyncio.create_task(queue.backpressure.wait(lambda reasons: queue.commits in reasons))
    await settle()
    assert not waiting.done()

    queue.log.finish()
    await settle()

    assert not queue.blocked
    assert waiting.done()
    assert await first == 1
    queue.log.finish()
    assert await second == 1
    assert queue.commits.pending_bytes == 0
    records = [getattr(each, "zbus", {}) for each in caplog.records if each.name == "zbus"]
    (record,) = [each for each in records if each["record"] == EVENT_BACKPRESSURE]
    assert (record["code"], record["reason"]) == ("commits_pending", "too many bytes await commit")
    assert record["blocked_total"] == queue.backpressure.blocked_count == 1


async def test_publishers_wait_as_soon_as_a_burst_of_one_turn_has_too_many_bytes() -> None:
    queue = Queue()
    waiting = [queue.commits.add(row(1)), *[queue.commits.add(row(FLUSH_BYTES // 2)) for _ in range(2)]]

    assert queue.blocked, "the rest of the burst is not appended with it"
    queue.log.finish()
    queue.log.finish()
    assert await asyncio.gather(*waiting) == [1, 1, 2]


async def test_many_rows_with_many_bytes_are_appended_at_once() -> None:
    queue = Queue()
    storing = queue.commits.add_many([row(FLUSH_BYTES)])

    assert queue.blocked
    queue.log.finish()
    assert (await storing).offsets == [1]


async def test_publishers_continue_after_a_commit_that_failed() -> None:
    queue = Queue()
    storing = queue.commits.add_many([row(BYTES_MAX), row(BYTES_MAX)])
    await settle()
    assert queue.blocked

    queue.log.finish(LogError("the disk is full"))

    with pytest.raises(LogError, match="the disk is full"):
        await storing
    assert not queue.blocked
    assert queue.stored == []


async def test_publishers_wait_until_every_byte_over_the_limit_is_stored() -> None:
    queue = Queue()
    for _ in range(3):
        queue.commits.add(row(BYTES_MAX)).add_done_callback(lambda done: None)
        await settle()
    assert queue.blocked

    queue.log.finish()
    await settle()
    assert queue.blocked
    queue.log.finish()
    await settle()
    assert not queue.blocked
    queue.log.finish()
    await queue.commits.drained()


async def test_backpressure_of_the_log_begins_and_ends_as_often_as_the_log_falls_behind() -> None:
    queue = Queue()
    for times in range(1, 4):
        storing = queue.commits.add_many([row(BYTES_MAX + 1)])
        await settle()
        assert (queue.blocked, queue.backpressure.blocked_count) == (True, times)
        queue.log.finish()
        await storing
        assert not queue.blocked


async def test_what_is_stored_ends_the_backpressure_of_the_log_and_no_other() -> None:
    queue = Queue()
    subscription = object()
    queue.backpressure.block(subscription, "queue_full", "a queue is full")
    storing = queue.commits.add_many([row(BYTES_MAX + 1)])
    await settle()
    assert queue.blocked

    queue.log.finish()
    await storing

    assert not queue.blocked
    assert queue.backpressure.applies(lambda reasons: subscription in reasons)


async def test_rows_are_stored_in_order_and_each_caller_gets_its_offsets() -> None:
    queue = Queue()
    one, many = queue.commits.add(row(1)), queue.commits.add_many([row(1), row(1)])
    await settle()
    queue.log.finish()
    queue.log.finish()

    assert (await one, await many) == (1, Stored([1, 2]))
    assert [len(rows) for rows, _ in queue.stored] == [1, 2]


async def test_one_row_that_is_added_as_many_gets_its_outcome() -> None:
    queue = Queue()
    many = queue.commits.add_many([row(1)])
    await settle()
    queue.log.finish()

    assert await asyncio.wait_for(many, 5) == Stored([1])
    assert queue.commits.stored_events == 1


async def test_closing_fails_every_publisher_that_the_log_gave_no_result() -> None:
    queue = Queue()
    one, many = queue.commits.add(row(1)), queue.commits.add_many([row(1), row(1)])
    await settle()
    unsent = queue.commits.add_many([row(1)])

    queue.commits.close()

    for waiting in (one, many):
        with pytest.raises(LogError, match="the outcome is unknown"):
            await asyncio.wait_for(waiting, 5)
    with pytest.raises(LogError, match="not stored"):
        await asyncio.wait_for(unsent, 5)
    assert queue.counts == [("outcome_unknown", 1), ("outcome_unknown", 2)]
    assert queue.commits.pending_bytes == 0
    await asyncio.wait_for(queue.commits.drained(), 5)


async def test_a_result_that_arrives_while_closing_counts_and_a_later_one_is_ignored() -> None:
    queue = Queue()
    first = queue.commits.add(row(1))
    second = queue.commits.add_many([row(1)])
    await settle()
    queue.log.finish()

    queue.commits.close()
    queue.log.finish()
    await settle()

    assert await first == 1
    with pytest.raises(LogError):
        await second
    assert queue.commits.pending_bytes == 0


async def test_what_is_published_after_closing_is_rejected() -> None:
    queue = Queue()
    queue.commits.close()

    with pytest.raises(LogError, match="not stored"):
        await asyncio.wait_for(queue.commits.add(row(1)), 5)
    assert queue.log.pending == []


@pytest.fixture
async def reported() -> AsyncIterator[list[dict[str, Any]]]:
    """What the loop's exception handler got."""
    found: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.append(context))
    yield found
    loop.set_exception_handler(None)


async def test_a_listener_that_raises_keeps_no_publisher_and_no_other_listener_waiting(
    reported: list[dict[str, Any]],
) -> None:
    queue = Queue()

    def fail(rows: Sequence[Row], offsets: Sequence[int]) -> None:
        raise ValueError("a defect")

    queue.commits.listeners = (fail, *queue.commits.listeners)
    one, many = queue.commits.add(row(1)), queue.commits.add_many([row(1), row(1)])
    await settle()
    queue.log.finish()
    queue.log.finish()  # in the same turn of the loop

    assert (await asyncio.wait_for(one, 5), await asyncio.wait_for(many, 5)) == (1, Stored([1, 2]))
    assert [len(rows) for rows, _ in queue.stored] == [1, 2]
    assert [str(each["exception"]) for each in reported] == ["a defect"] * 2


async def test_a_log_that_raises_or_returns_too_few_offsets_keeps_no_publisher_waiting(
    reported: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue()
    first, second = queue.commits.add(row(1)), queue.commits.add(row(1))
    await settle()
    for _, done, about in queue.log.pending:
        done(AppendResult(about, Stored([])))
    for waiting in (first, second):
        with pytest.raises(LogError, match="the outcome is unknown"):
            await asyncio.wait_for(waiting, 5)

    def fail(*args: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(queue.commits, "_append", fail)
    with pytest.raises(LogError, match="a defect"):
        await asyncio.wait_for(queue.commits.add(row(1)), 5)
    assert queue.counts == [("outcome_unknown", 1)] * 3
    assert len(reported) == 3
    await asyncio.wait_for(queue.commits.drained(), 5)


async def test_a_log_handler_that_raises_keeps_no_publisher_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left for the log file")

    queue, broken, logger = Queue(), Broken(), logging.getLogger("zbus")
    level = logger.level
    logger.addHandler(broken)
    logger.setLevel(logging.DEBUG)
    try:
        storing = [queue.commits.add(row(BYTES_MAX)), queue.commits.add_many([row(BYTES_MAX)])]
        await settle()
        queue.log.finish()
        queue.log.finish()
        assert [await asyncio.wait_for(each, 5) for each in storing] == [1, Stored([1])]
    finally:
        logger.removeHandler(broken)
        logger.setLevel(level)
    assert "no space left for the log file" in capsys.readouterr().err


async def test_each_publisher_of_a_failed_commit_gets_an_exception_of_its_own() -> None:
    queue = Queue()
    waiting = [queue.commits.add_many([row(1)]) for _ in range(3)]  # one burst
    await settle()
    queue.log.finish(LogError("the disk is full"))

    errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    assert len(set(map(id, errors))) == 3
    assert all(isinstance(each, LogError) and "the disk is full" in str(each) for each in errors)
