"""What the tests of the log share: appending and waiting for it, conditions with a deadline, a look into the file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from zbus import BusConfig
from zbus.ports.log import AppendResult, Row, Stored
from zbus_log import SqliteLog, open_log
from zbus_log.file import sqlite_driver


def append(log: SqliteLog, rows: list[Row], deadline_s: float = 20.0) -> list[int]:
    """Append and wait until the rows are durable."""
    answers: SimpleQueue[Any] = SimpleQueue()
    log.append(rows, answers.put, None)
    return list(offsets_of(answers.get(timeout=deadline_s)))


@contextmanager
def opened(path: str | Path, **settings: Any) -> Iterator[SqliteLog]:
    """Open a log for the duration of a block."""
    log = open_log(BusConfig(log=str(path), **settings))
    try:
        yield log
    finally:
        log.close(5.0)


def offsets_of(answer: AppendResult) -> Sequence[int]:
    """The offsets of an append that was stored; raises the error of one that was not."""
    if not isinstance(answer.outcome, Stored):
        raise answer.outcome.error
    return answer.outcome.offsets


def wait_until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


def raw(path: str | Path) -> Any:
    """A connection of our own to the file, that knows nothing of the log's."""
    return sqlite_driver.connect(str(path))


def ask(path: str | Path, request: str) -> Any:
    """The first value that a query returns."""
    connection = raw(path)
    try:
        return connection.execute(request).fetchone()[0]
    finally:
        connection.close()


def sealed_blocks(path: str | Path) -> int:
    return int(ask(path, "SELECT count(*) FROM blocks"))
