"""What the contract suite of the log port runs on: a log in SQLite, one in memory, a fake one with many writers, and
the simulated one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, Protocol

from fake_log import FakeLane, History
from real_timers import Timers

from zbus import BusConfig
from zbus.event import Event
from zbus.keys import KeySet
from zbus.ports.log import AppendResult, Log, Outcome, Row, Span, Stored
from zbus.sim.machine.disk import Disk
from zbus.sim.machine.log import SimLog
from zbus_log import Rules, SqliteLog, open_log

WAIT_S = 20.0
EVERYTHING = KeySet.all()


class Logs(Protocol):
    """One kind of log. What it opened is closed by `close`."""

    def open(self) -> Log:
        """A log that is empty at first: the same one each time, as far as it survives being closed."""

    def another_writer(self) -> Log:
        """A second writer of the history of `open`, where there can be one."""

    def reader(self) -> Log | None:
        """The same log, for reading alone; None for one that no other process sees."""

    def trim(self, log: Log, until: int) -> None:
        """Let retention remove everything up to an offset."""

    def let_the_holder_be_gone(self, log: Log) -> None:
        """Let the holder of every lease of this log be gone, without a release."""

    def close(self) -> None:
        """Close what is open."""


class SqliteLogs:
    """A log in a file."""

    durable = True

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "app.db")
        self._opened: list[SqliteLog] = []

    def open(self) -> Log:
        return self._open(log=self._path)

    def another_writer(self) -> Log:
        raise AssertionError("it promises one writer")

    def reader(self) -> Log | None:
        return self._open(log=self._path, read_only=True)

    def trim(self, log: Log, until: int) -> None:
        assert isinstance(log, SqliteLog)
        log.prune(Rules(until=until, ignore_cursors=True))

    def let_the_holder_be_gone(self, log: Log) -> None:
        assert isinstance(log, SqliteLog)
        shutil.rmtree(f"{log.path}-leases")  # the holder knows nothing of that

    def close(self) -> None:
        for log in self._opened:
            log.close(5.0)

    def _open(self, **settings: Any) -> SqliteLog:
        self._opened.append(open_log(BusConfig(**settings)))
        return self._opened[-1]


class MemoryLogs(SqliteLogs):
    """A log in memory: it ends when it is closed."""

    durable = False

    def open(self) -> Log:
        return self._open(log="memory")

    def reader(self) -> Log | None:
        return None


class FakeLogs:
    """A fake log with many writers."""

    durable = True

    def __init__(self, folder: Path) -> None:
        self.history = History()
        self._opened: list[FakeLane] = []

    def open(self) -> FakeLane:
        return self._keep(self.history.open("a"))

    def another_writer(self) -> FakeLane:
        return self._keep(self.history.open("b"))

    def reader(self) -> FakeLane:
        return self._keep(self.history.open("reader", read_only=True))

    def trim(self, log: Log, until: int) -> None:
        self.history.trim(until)

    def let_the_holder_be_gone(self, log: Log) -> None:
        assert isinstance(log, FakeLane)
        log.silent = True
        self.history.pass_time(31.0)
        log.silent = False  # it is back, and does not know

    def close(self) -> None:
        for log in self._opened:
            log.close(5.0)

    def _keep(self, log: FakeLane) -> FakeLane:
        self._opened.append(log)
        return log


class SimLogs:
    """The simulated log, on a real thread. Its disk outlives it."""

    durable = True

    def __init__(self, folder: Path) -> None:
        self.disk = Disk("app.db", Random(7))
        self.disk.fsync_s, self.disk.notify_s = (0.0001, 0.001), (0.0, 0.0005)
        self._timers = Timers()
        self._opened: list[SimLog] = []

    def open(self) -> SimLog:
        return self.open_as()

    def another_writer(self) -> Log:
        raise AssertionError("it promises one writer")

    def reader(self) -> SimLog:
        return self.open_as(read_only=True)

    def open_as(self, *, read_only: bool = False) -> SimLog:
        log = SimLog(self.disk, self._timers.later, time.time_ns, Random(len(self._opened)), read_only=read_only)
        self._opened.append(log)
        return log

    def trim(self, log: Log, until: int) -> None:
        with self.disk.lock:
            self.disk.trim(until)

    def let_the_holder_be_gone(self, log: Log) -> None:
        with self.disk.lock:
            self.disk.leases.clear()

    def close(self) -> None:
        for log in self._opened:
            log.close(5.0)
        self._timers.end()


KINDS: dict[str, Callable[[Path], Logs]] = {
    "sqlite": SqliteLogs,
    "memory": MemoryLogs,
    "fake": FakeLogs,
    "sim": SimLogs,
}


def rows(count: int, publisher: int = 7, start: int = 0, key: str = "shop/orders", at: int = 1_000) -> list[Row]:
    """Rows of one publisher, each with a time of its own."""
    return [
        Row(publisher, n, at + n, key, b"%d of %d" % (n, publisher), None, None) for n in range(start, start + count)
    ]


def outcome_of(log: Log, batch: Sequence[Row]) -> Outcome:
    """Append, and wait for the outcome."""
    answers: SimpleQueue[AppendResult] = SimpleQueue()
    log.append(batch, answers.put, None)
    return answers.get(timeout=WAIT_S).outcome


def append(log: Log, batch: Sequence[Row]) -> Stored:
    """Append rows that are stored."""
    outcome = outcome_of(log, batch)
    assert isinstance(outcome, Stored), outcome
    return outcome


def follow(log: Log, until: int, keys: KeySet = EVERYTHING, span: Span | None = None, limit: int = 100) -> list[Event]:
    """Every event of a span, page by page, until `until` is covered; checks what each page says of itself."""
    span = span or Span()
    found: list[Event] = []
    deadline = time.monotonic() + WAIT_S
    while span.after < until:
        assert time.monotonic() < deadline, f"the pages do not get beyond offset {span.after}"
        page = log.read(keys, span, limit)
        events, error, skipped = page.events()
        assert (error, skipped) == (None, 0)
        assert len(events) <= limit
        assert page.covered >= span.after
        assert all(span.after < event.offset <= page.covered for event in events)
        found += events
        span = span._replace(after=page.covered)
    return found


def wait_until(condition: Callable[[], object]) -> None:
    """Wait with a deadline."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)
