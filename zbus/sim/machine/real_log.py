"""A real log below a simulated disk: the second, slower choice of a world, `zbus.sim.world(logs="sqlite")`.

Time and faults stay simulated. What becomes durable on the disk is appended to a real log, and reads come from there;
both must be the same as on the simulated disk. When a process ends, the real log is closed and opened again. So each
run compares SQLite with its simulation, and has the same trace.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from zbus import plugins
from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, LogError
from zbus.event import Event
from zbus.keys import KeySet
from zbus.ports.log import AppendResult, Log, Page, Row, Span, Stored

from .boundary import outside

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
        self._log = self._open()

    def stored(self, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        """Append rows that the simulated disk has stored at these offsets."""
        results: SimpleQueue[AppendResult] = SimpleQueue()
        with outside():
            self._log.append(rows, results.put, None)
            try:
                outcome = results.get(timeout=REAL_S).outcome
            except Empty:
                raise LogError(f"the real log of {self._name} did not reply within {REAL_S:g} s") from None
        found = list(outcome.offsets) if isinstance(outcome, Stored) else outcome
        if found != list(offsets):
            self._report(f"an append has the offsets {list(offsets)}, and {found} in the real log")

    def page(self, expected: Page, keys: KeySet, span: Span, limit: int, low_water: int) -> Page:
        """Return a page of the real log. Where it does not reach as far as the simulated one, return that one."""
        with outside():
            page = self._log.read(keys, span._replace(after=max(span.after, low_water)), limit)
            found, wanted = page.events(), expected.events()
        if wanted[1] is not None or page.covered < expected.covered:
            return expected  # an event is corrupt, or the real log has scanned less
        events = [event for event in found[0] if event.offset <= expected.covered]
        if not _equal(events, wanted[0]):
            self._report(f"a page after offset {span.after} has {len(wanted[0])} events, and others in the real log")
        return RealPage(events, expected.covered, expected.low_water)

    def reopen(self, rows: Sequence[Row], low_water: int) -> None:
        """Close the log and open it again, as a restarted process does, and compare it with the simulated rows."""
        self.close()
        self._log = self._open()
        with outside():
            head, after = self._log.head(), low_water
            found: list[Event] = []
            while after < head:
                page = self._log.read(EVERYTHING, Span(after), COMPARED_EVENTS)
                found += page.events()[0]
                after = page.covered
        if not _equal(found, [row.event(event.offset) for row, event in zip(rows, found, strict=False)]):
            self._report("its events differ from those of the real log after a restart")
        if head != low_water + len(rows):
            self._report(f"it ends at offset {low_water + len(rows)}, and at {head} in the real log")

    def rebuild(self, rows: Sequence[Row], low_water: int) -> None:
        """Begin anew, because the disk was replaced by a copy. Retention must not have removed anything from that."""
        if low_water:
            raise ConfigInvalid("logs", "a copy whose first events were removed cannot be put into a real log")
        self.close()
        self._path = f"{self._path}-restored"
        self._log = self._open()
        if rows:
            self.stored(rows, range(1, len(rows) + 1))

    def close(self) -> None:
        """Close the log."""
        with outside():
            self._log.close(REAL_S)

    def _open(self) -> Log:
        with outside():
            log = plugins.open_log(BusConfig.exactly(log=self._path))
        assert log is not None
        return log


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
