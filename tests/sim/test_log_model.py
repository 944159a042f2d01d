"""The simulated log and the SQLite log give the same answers, whatever is asked of them in whatever order."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from log_contract import WAIT_S, outcome_of
from sim_machine import Machine

from zbus import BusConfig
from zbus.errors import LogTrimmed, ZbusError
from zbus.keys import KeySet
from zbus.ports.log import Log, Row, Schema, Span, Stored
from zbus.sim.machine.log import SimLog
from zbus_log import Rules, SqliteLog, open_log

KEYS = ["a", "a/b", "a/b/c", "x"]
EXPRESSIONS = [["**"], ["a/**"], ["a", "x"], ["*/b"], ["nothing/here"]]
OFFSETS = st.integers(0, 20)
TIMES = st.none() | st.integers(0, 6)

rows = st.builds(
    Row,
    publisher_id=st.integers(1, 2),
    sequence=st.integers(0, 8),
    published_at=st.integers(0, 6),
    key=st.sampled_from(KEYS),
    payload=st.binary(max_size=3),
)
spans = st.builds(Span, OFFSETS, st.none() | OFFSETS, TIMES, TIMES)


def shown(log: Log, expressions: list[str], span: Span, limit: int) -> Any:
    """Every event of a span, page by page, and how far it was read; or what retention has removed."""
    keys, found = KeySet(expressions), []
    end = log.head() if span.until is None else min(span.until, log.head())
    try:
        while True:
            page = log.read(keys, span, limit)
            events, error, skipped = page.events()
            assert (error, skipped) == (None, 0)
            assert len(events) <= limit
            found += [(e.offset, *e.identity, e.published_at, e.key, e.payload) for e in events]
            assert page.covered >= span.after
            assert page.low_water == log.low_water()
            span = span._replace(after=page.covered)
            if span.after >= end:
                return found, span.after
    except LogTrimmed as trimmed:
        return trimmed.args


class Held(NamedTuple):
    """A lease in both logs. Tokens end with the process that claimed them: no later one knows them."""

    name: str
    simulated: str
    real: str
    opened: int  # how often the logs were opened when it was claimed


class Logs(RuleBasedStateMachine):
    """Does the same to both logs, and compares what they say."""

    leases = Bundle("leases")
    old_leases = Bundle("old_leases")  # released

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.machine = Machine()
        self.opened = 0
        self._open()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.sqlite.close(5.0)
            shutil.rmtree(self.folder)

    def _open(self) -> None:
        self.opened += 1
        self.sqlite: SqliteLog = open_log(BusConfig(log=f"{self.folder}/app.db"))
        self.sim: SimLog = self.machine.open()
        self.tails: tuple[list[int], list[int]] = ([], [])
        after = [
            log.tail(lambda committed, tail=tail: tail.extend(committed.offsets))  # type: ignore[misc]
            for log, tail in zip((self.sim, self.sqlite), self.tails, strict=True)
        ]
        assert after[0] == after[1]

    def _same(self, call: Callable[[Any], Any]) -> Any:
        """Make a call on both logs: both return the same, or both raise the same kind of error."""
        found: list[Any] = []
        for log in (self.sim, self.sqlite):
            try:
                found.append(call(log))
            except ZbusError as error:
                found.append(type(error))
        assert found[0] == found[1]
        return found[0]

    # Events.

    @rule(batch=st.lists(rows, max_size=12))
    def append(self, batch: list[Row]) -> None:
        simulated, stored = self.machine.outcome(self.sim, batch), outcome_of(self.sqlite, batch)
        assert isinstance(simulated, Stored)
        assert isinstance(stored, Stored)
        assert list(simulated.offsets) == list(stored.offsets)
        assert set(simulated.repeated) == set(stored.repeated)
        assert self.tails[0] == self.tails[1]

    @rule(expressions=st.sampled_from(EXPRESSIONS), span=spans, limit=st.sampled_from([1, 2, 7, 100]))
    def read(self, expressions: list[str], span: Span, limit: int) -> None:
        self._same(lambda log: shown(log, expressions, span, limit))

    @rule(span=spans)
    def narrow(self, span: Span) -> None:
        def events(log: Log) -> Any:
            narrowed = log.narrow(span)
            assert narrowed.until is not None
            assert narrowed.until <= log.head()
            assert narrowed.after >= span.after
            found = shown(log, ["**"], narrowed, 100)
            assert found[0] == shown(log, ["**"], span, 100)[0]
            return found[0]

        self._same(events)

    @rule(from_ns=st.integers(0, 7))
    def start_by_time(self, from_ns: int) -> None:
        self._same(lambda log: log.narrow(Span(from_ns=from_ns)))

    @rule(until=OFFSETS)
    def trim(self, until: int) -> None:
        self.machine.disk.trim(until)
        self.sqlite.prune(Rules(until=until, ignore_cursors=True))

    @rule(expressions=st.sampled_from(EXPRESSIONS))
    def purge(self, expressions: list[str]) -> None:
        self._same(lambda log: log.purge(KeySet(expressions))[:3])

    @rule(offset=OFFSETS, other=OFFSETS)
    def calculate(self, offset: int, other: int) -> None:
        self._same(lambda log: (log.before(offset), log.count(offset, other)))

    # Cursors.

    @rule(target=leases, name=st.sampled_from("abc"), keys=st.sampled_from(EXPRESSIONS), start=OFFSETS)
    def claim(self, name: str, keys: list[str], start: int) -> Any:
        tokens: list[str] = []

        def claim(log: Log) -> Any:
            lease = log.cursors.claim(name, keys, start)
            tokens.append(lease.token)
            return lease.offset, lease.keys

        self._same(claim)
        return Held(name, *tokens, self.opened) if tokens else multiple()

    @rule(lease=leases | old_leases, offset=OFFSETS)
    def advance(self, lease: Held, offset: int) -> None:
        if lease.opened != self.opened:
            return
        answers: SimpleQueue[ZbusError | None] = SimpleQueue()
        self.sim.cursors.advance(lease.name, lease.simulated, offset, answers.put)
        self.machine.run()
        first = answers.get_nowait()
        self.sqlite.cursors.advance(lease.name, lease.real, offset, answers.put)
        assert type(first) is type(answers.get(timeout=WAIT_S))

    @rule(target=old_leases, lease=consumes(leases), offset=st.none() | OFFSETS)
    def release(self, lease: Held, offset: int | None) -> Any:
        """Release a lease, perhaps with a position that waits."""
        if lease.opened != self.opened:
            return multiple()
        for log, token in ((self.sim, lease.simulated), (self.sqlite, lease.real)):
            if offset is not None:
                log.cursors.advance(lease.name, token, offset)
            log.cursors.release(lease.name, token)
        return lease

    @rule(name=st.sampled_from("abcd"), offset=OFFSETS)
    def reset(self, name: str, offset: int) -> None:
        self._same(lambda log: log.cursors.reset(name, offset))

    @rule(name=st.sampled_from("abcd"))
    def delete(self, name: str) -> None:
        self._same(lambda log: log.cursors.delete(name))

    # What else is stored.

    @rule(names=st.dictionaries(st.sampled_from(["from/a", "from/b", "sent/x"]), st.integers(0, 1 << 62), min_size=1))
    def store_positions(self, names: dict[str, int]) -> None:
        self._same(lambda log: log.positions.store(names))

    @rule(names=st.sets(st.sampled_from(["from/a", "from/b", "nobody"]), min_size=1))
    def remove_positions(self, names: set[str]) -> None:
        self._same(lambda log: log.positions.remove(names))

    @rule(expression=st.sampled_from(["a", "b"]), version=st.integers(1, 3))
    def store_schema(self, expression: str, version: int) -> None:
        self._same(lambda log: log.schemas.store(Schema(expression, version, "strict", "hash", {}, 5)))

    # Processes.

    @rule()
    def reopen(self) -> None:
        for log in (self.sim, self.sqlite):
            log.close(5.0)
        ids = self.sim.log_id, self.sqlite.log_id
        self._open()
        assert ids == (self.sim.log_id, self.sqlite.log_id)

    @invariant()
    def both_say_the_same(self) -> None:
        if hasattr(self, "folder"):
            self._same(lambda log: (log.head(), log.low_water(), shown(log, ["**"], Span(), 100)))
            self._same(lambda log: [(c.name, c.offset, c.keys, c.owner is None) for c in log.cursors.list()])
            self._same(lambda log: log.positions.load())
            self._same(lambda log: list(log.schemas.load()))


Logs.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLogs = Logs.TestCase
