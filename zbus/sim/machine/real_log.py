"""A real log below a simulated disk: the second, slower choice of a world, `zbus.sim.world(logs="sqlite")`.

Time and faults stay simulated. Events, cursors, positions and schemas on the disk are also stored in a real log, and
reads come from there; both must be the same as on the simulated disk. When a process ends, the real log is closed and
opened again. So each run compares SQLite with its simulation, and has the same trace.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from zbus import plugins
from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, LogError, ZbusError
from zbus.event import Event
from zbus.keys import KeySet
from zbus.ports.log import AppendResult, Committed, Lease, Log, Page, Row, Schema, Span, Stored
from zbus.sim.errors import WorldStuck

from .boundary import outside
from .disk import Disk

if TYPE_CHECKING:
    from .disk import Real

T = TypeVar("T")

REAL_S = 20.0  # of real time, for one commit
EVERYTHING = KeySet.all()
COMPARED_EVENTS = 1000  # at once, when the log is opened again

Report = Callable[[str], None]


class RealLogs:
    """The folder with the real logs of one world, in memory if the machine has such a file system."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")  # noqa: S108
        self._folder = tempfile.mkdtemp(prefix="zbus-sim-", dir=memory if memory.is_dir() else None)
        self._opened: list[RealLog] = []

    def open(self, name: str, report: Report) -> RealLog:
        """Open the real log of a disk."""
        number = len(self._opened)
        self._opened.append(RealLog(str(Path(self._folder) / f"{number}.db"), name, report))
        return self._opened[-1]

    def close(self) -> None:
        """Close and remove all of them."""
        for log in self._opened:
            log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class RealLog:
    """One real log. `report` is called with each difference from the simulated one."""

    def __init__(self, path: str, name: str, report: Report) -> None:
        self._path, self._name, self._report = path, name, report
        self._tail: SimpleQueue[Committed] = SimpleQueue()
        self._tokens: dict[str, str] = {}  # of the leases that are held, by name
        self._is_closed = False
        self._log = self._open()

    # Events.

    def stored(self, rows: Sequence[Row], offsets: Sequence[int], repeated: Collection[int]) -> None:
        """Append rows that the simulated disk has stored at these offsets."""
        if self._is_closed:
            return
        results: SimpleQueue[AppendResult] = SimpleQueue()
        with outside():
            self._log.append(rows, results.put, None)
            outcome = self._wait(results).outcome
        if not isinstance(outcome, Stored):
            self._report(f"an append has the offsets {list(offsets)}, and fails in the real log: {outcome.error}")
            return
        self._compare("the offsets of an append", list(offsets), list(outcome.offsets))
        self._compare("the repeated rows of an append", sorted(repeated), sorted(outcome.repeated))
        tail: list[int] = []
        while not self._tail.empty():
            tail += self._tail.get_nowait().offsets
        self._compare("the tail", [each for at, each in enumerate(offsets) if at not in repeated], tail)

    def page(self, expected: Page, keys: KeySet, span: Span, limit: int, low_water: int) -> Page:
        """Return a page of the real log. Where it does not reach as far as the simulated one, return that one."""
        if self._is_closed:
            return expected
        with outside():
            page = self._log.read(keys, span._replace(after=max(span.after, low_water)), limit)
            found, wanted = page.events(), expected.events()
        if wanted[1] is not None or page.covered < expected.covered:
            return expected  # an event is corrupt, or the real log has scanned less
        events = [event for event in found[0] if event.offset <= expected.covered]
        if not _equal(events, wanted[0]):
            self._report(f"a page after offset {span.after} has {len(wanted[0])} events, and others in the real log")
        return RealPage(events, expected.covered, expected.low_water)

    def purged(self, keys: KeySet, removed: int) -> None:
        """Purge some keys. Retention by key is simulated only: a world has no such setting."""
        self._call("the number of purged events", lambda: self._log.purge(keys).removed, removed)

    # Cursors, positions and schemas, which are stored beside the events.

    def claimed(self, name: str, keys: Sequence[str], start: int, lease: Lease) -> None:
        """Take the lease of a durable name."""

        def claim() -> tuple[int, tuple[str, ...]]:
            found = self._log.cursors.claim(name, keys, start)
            self._tokens[name] = found.token
            return found.offset, found.keys

        self._call(f"the lease of {name!r}", claim, (lease.offset, lease.keys))

    def advanced(self, name: str, offset: int) -> None:
        """Store the position of a durable name whose lease is held."""

        def advance() -> None:
            results: SimpleQueue[ZbusError | None] = SimpleQueue()
            self._log.cursors.advance(name, self._tokens.get(name, ""), offset, results.put)
            if (error := self._wait(results)) is not None:
                raise error

        self._call(f"the position of {name!r}", advance, None)

    def released(self, name: str) -> None:
        """Release the lease of a durable name."""
        token = self._tokens.pop(name, "")
        self._call(f"the release of {name!r}", lambda: self._log.cursors.release(name, token), None)

    def moved(self, name: str, offset: int | None) -> None:
        """Move a cursor, or delete it."""
        cursors = self._log.cursors
        call = partial(cursors.delete, name) if offset is None else partial(cursors.reset, name, offset)
        self._call(f"the change of {name!r}", call, None)

    def positions_changed(self, changed: Mapping[str, int], removed: Collection[str] = ()) -> None:
        """Store and remove positions."""
        if changed:
            self._call("the positions", lambda: self._log.positions.store(changed), None)
        if removed:
            self._call("the positions", lambda: self._log.positions.remove(removed), None)

    def schema_stored(self, schema: Schema) -> None:
        """Store one more version of a schema."""
        self._call("the schemas", lambda: self._log.schemas.store(schema), None)

    # Processes and copies.

    def reopen(self, disk: Disk) -> None:
        """Close the log and open it again, as a restarted process does, and compare it with the simulated disk."""
        if self._is_closed:
            return
        self.close()
        self._is_closed = False
        self._log = self._open()
        with outside():
            head, after = self._log.head(), disk.low_water
            found: list[Event] = []
            while after < head:
                page = self._log.read(EVERYTHING, Span(after), COMPARED_EVENTS)
                found += page.events()[0]
                after = page.covered
            cursors = {each.name: (each.offset, each.keys, each.owner) for each in self._log.cursors.list()}
            positions, schemas = self._log.positions.load(), list(self._log.schemas.load())
        stored = [row.event(offset) for offset, row in disk.stored(after=disk.low_water)]
        if not _equal(found, stored):
            self._report("its events differ from those of the real log after a restart")
        self._compare("the head after a restart", disk.head, head)
        wanted = {name: (each.offset, each.keys, None) for name, each in disk.cursors.items()}
        self._compare("the cursors after a restart", wanted, cursors)
        self._compare("the schemas after a restart", sorted(disk.schemas), sorted(schemas))
        if positions != disk.positions:  # a power cut has removed the newest values
            self._compare("the names of positions after a restart", sorted(disk.positions), sorted(positions))
            self.positions_changed(disk.positions)

    def rebuild(self, disk: Disk) -> None:
        """Begin anew, because the disk was replaced by a copy. Retention must not have removed anything from that."""
        if disk.low_water or disk.purged:
            raise ConfigInvalid("logs", "a copy from which events were removed cannot be put into a real log")
        self.close()
        self._path, self._is_closed = f"{self._path}-restored", False
        self._log = self._open()
        self.stored(disk.rows, range(1, len(disk.rows) + 1), ())
        for name, cursor in disk.cursors.items():
            self.claimed(name, cursor.keys, cursor.offset, Lease("", cursor.offset, ()))
            self.released(name)
        self.positions_changed(disk.positions)
        for schema in disk.schemas:
            self.schema_stored(schema)

    def close(self) -> None:
        """Close the log. From now on nothing is compared."""
        self._is_closed = True
        with outside():
            self._log.close(REAL_S)

    def _open(self) -> Log:
        self._tokens.clear()
        with outside():
            log = plugins.open_log(BusConfig.exactly(log=self._path))
            assert log is not None
            log.tail(self._tail.put)
        return log

    def _call(self, what: str, call: Callable[[], object], expected: object) -> None:
        """Call the real log and compare what it returns."""
        if self._is_closed:
            return
        with outside():
            try:
                found = call()
            except ZbusError as error:
                found = repr(error)
        self._compare(what, expected, found)

    def _compare(self, what: str, simulated: object, real: object) -> None:
        if simulated != real:
            self._report(f"{what}: {simulated}, and {real} in the real log")

    def _wait(self, results: SimpleQueue[T]) -> T:
        try:
            return results.get(timeout=REAL_S)
        except Empty:
            raise WorldStuck(f"the real log of {self._name} did not reply within {REAL_S:g} s") from None


class RealPage:
    """The events of a page that were read from the real log."""

    __slots__ = ("_events", "covered", "low_water")

    def __init__(self, events: list[Event], covered: int, low_water: int) -> None:
        self._events, self.covered, self.low_water = events, covered, low_water

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        """Return the events. None of them is corrupt."""
        return self._events, None, 0


def _equal(found: Sequence[Event], wanted: Sequence[Event]) -> bool:
    return len(found) == len(wanted) and all(
        one == other and one.provenance == other.provenance for one, other in zip(found, wanted, strict=True)
    )


if TYPE_CHECKING:
    _real: type[Real] = RealLog
