"""A real log in a simulated world: slower than the simulated one, and the code that runs in production.

The simulated disk stays beside the real log, and everything is done to both. So time, faults, steps and the ledger work
as with a simulated log, and a difference between the two is an error. The real log is called at the steps at which the
simulated one becomes durable, and the world waits for it in real time. Its own threads therefore never run beside the
world, and a seed gives the same run. A kill closes the real log between two of its calls.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from typing import TYPE_CHECKING, Any

from zbus import plugins
from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, EventCorrupt, LogError, ZbusError
from zbus.event import Event
from zbus.keys import KeySet
from zbus.ports.log import AppendResult, Committed, Cursor, Lease, Log, Page, Promise, Row, Schema, Span, Stored
from zbus.sim.errors import WorldBoundary, WorldStuck

from .boundary import outside
from .disk import Disk
from .log import Access, Later, Retention, SimCursors, SimLog, SimPositions, SimSchemas

REAL_S = 20.0  # how long the real log may take for one call
IN_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it has a name of its own


class LogsDiffer(ZbusError):
    """The real log did not do what the simulated one does. One of them has a defect."""

    def __init__(self, what: str, simulated: object, real: object) -> None:
        super().__init__(what, simulated, real)
        self.what, self.simulated, self.real = what, simulated, real

    def __str__(self) -> str:
        return f"{self.what}: the simulated log has {self.simulated!r}, and the real one {self.real!r}"


class RealLogs:
    """The real logs of one world, in a folder of their own that is removed at the end."""

    def __init__(self, scheme: str) -> None:
        plugins._load("zbus.logs", scheme, "logs")  # before the world begins: an import may use chance
        self._folder = Path(tempfile.mkdtemp(prefix="zbus-sim-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
        self._disks: list[RealDisk] = []

    def disk(self, name: str, chance: Random) -> RealDisk:
        """Return a disk with an empty log."""
        path = str(self._folder / f"{len(self._disks)}.db")

        def open_real(read_only: bool) -> Log:
            log = plugins.open_log(BusConfig.exactly(log=path, read_only=read_only))
            assert log is not None
            return log

        disk = RealDisk(name, chance, open_real)
        self._disks.append(disk)
        return disk

    def close(self) -> None:
        """Close all logs and remove them."""
        for disk in self._disks:
            disk.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class RealDisk(Disk):
    """A simulated disk, and the real log that must have the same. `real` is None while no process has it open."""

    def __init__(self, name: str, chance: Random, open_real: Callable[[bool], Log]) -> None:
        super().__init__(name, chance)
        self._open_real = open_real
        self.real: Log | None = None
        self._tail: SimpleQueue[Committed] = SimpleQueue()

    def open(self, read_only: bool) -> None:
        """Open the real log for a new process."""
        with outside():
            self.real = real = self._open_real(read_only)
            same("the head when it is opened", self.head, real.head())
            if read_only:
                return
            self.log_id = real.log_id
            real.tail(self._tail.put)
            if real.positions.load() != self.positions:  # a power cut has removed the newest values
                real.positions.store(self.positions)

    def close(self) -> None:
        """Close the real log. Until it is opened again, only the simulated one is used."""
        real, self.real = self.real, None
        if real is not None:
            with outside():
                real.close(REAL_S)

    def store(self, rows: Sequence[Row]) -> tuple[list[int], set[int], list[Row], list[int]]:
        """Store the rows that are new, in both logs."""
        if self.real is None:
            return super().store(rows)
        real = self._append(self.real, rows)
        offsets, repeated, new, new_offsets = found = super().store(rows)
        same("the offsets of an append", offsets, list(real.offsets))
        same("the repeated rows of an append", repeated, set(real.repeated))
        tailed: list[tuple[Row, int]] = []
        while not self._tail.empty():
            tailed += zip(*self._tail.get_nowait(), strict=True)
        same("the tail", list(zip(new, new_offsets, strict=True)), tailed)
        return found

    def _append(self, real: Log, rows: Sequence[Row]) -> Stored:
        results: SimpleQueue[AppendResult] = SimpleQueue()
        with outside():
            real.append(rows, results.put, None)
            outcome = waited(results).outcome
        if not isinstance(outcome, Stored):
            raise outcome.error
        return outcome

    def process_ended(self, *, power_cut: bool) -> None:
        """The process was killed, or the power was cut."""
        super().process_ended(power_cut=power_cut)
        self.close()

    def copy(self) -> Disk:
        """Raise `WorldBoundary`: the files of a log that is open cannot be copied."""
        raise WorldBoundary("a copy of a real log", "use simulated logs for the faults 'restore' and 'clone'")


class RealLog(SimLog):
    """A log whose answers come from a real one, as long as its process lives."""

    def __init__(
        self,
        disk: RealDisk,
        later: Later,
        time_ns: Callable[[], int],
        chance: Random,
        *,
        owner: str = "process 1",
        pid: int = 1,
        read_only: bool = False,
        retention: Retention | None = None,
    ) -> None:
        if retention is not None:
            raise ConfigInvalid("logs", "a real log removes events by the real clock: use simulated logs for retention")
        super().__init__(disk, later, time_ns, chance, owner=owner, pid=pid, read_only=read_only)
        try:
            disk.open(self.read_only)
        except BaseException:
            disk.writer_pid = None
            raise
        self._disk = disk
        self._cursors = RealCursors(self._access, chance, owner, disk)
        self._positions = RealPositions(self._access, disk)
        self._schemas = RealSchemas(self._access, disk)

    @property
    def _real(self) -> Log | None:
        """The real log; None in the last step of a process that was killed."""
        return None if self._access.is_dead else self._disk.real

    @property
    def promise(self) -> Promise:
        """The guarantees of the real log."""
        real = self._real
        return super().promise if real is None else real.promise

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        """Return the next page of a span."""
        real = self._real
        if real is None:
            return super().read(keys, span, limit)
        with outside():
            page = real.read(keys, span, limit)
        return RealPage(page, self.disk.corrupt.copy()) if self.disk.corrupt else page

    def narrow(self, span: Span) -> Span:
        """Return the span with its times turned into offsets, and with an end."""
        real = self._real
        if real is None:
            return super().narrow(span)
        with outside():
            return real.narrow(span)

    def head(self) -> int:
        """Return the last committed offset."""
        if (real := self._real) is not None:
            with outside():
                same("the head", self.disk.head, real.head())
        return self.disk.head

    def close(self, timeout_s: float) -> None:
        """Store what was appended and release the log."""
        is_dead = self._access.is_dead
        super().close(timeout_s)
        if not is_dead:
            self._disk.close()


class RealPage:
    """A page of a real log on a disk with damaged events."""

    def __init__(self, page: Page, corrupt: set[int]) -> None:
        self._page, self._corrupt = page, corrupt
        self.covered, self.low_water = page.covered, page.low_water

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        """Return the events, the error that ends them early (or None), and the number of events skipped."""
        found, error, skipped = self._page.events(skip_corrupt)
        bad = [at for at, event in enumerate(found) if event.offset in self._corrupt]
        if bad and not skip_corrupt:
            return found[: bad[0]], EventCorrupt(found[bad[0]].offset, "its checksum does not match"), skipped
        return [event for event in found if event.offset not in self._corrupt], error, skipped + len(bad)


class RealCursors(SimCursors):
    """Cursors in both logs. The token of the simulated lease stands for that of the real one."""

    def __init__(self, access: Access, chance: Random, owner: str, disk: RealDisk) -> None:
        super().__init__(access, chance, owner)
        self._both = disk
        self._tokens: dict[str, str] = {}

    def claim(self, name: str, keys: Sequence[str], start: int) -> Lease:
        """Take the lease of `name`."""
        lease = super().claim(name, keys, start)
        if (real := self._real) is not None:
            with outside():
                taken = real.cursors.claim(name, keys, start)
            same(f"the lease of {name!r}", (lease.offset, lease.keys), (taken.offset, taken.keys))
            self._tokens[lease.token] = taken.token
        return lease

    def list(self) -> Sequence[Cursor]:
        """Return every cursor, by name."""
        found = super().list()
        if (real := self._real) is not None:
            with outside():
                same("the cursors", [_fields(each) for each in found], [_fields(each) for each in real.cursors.list()])
        return found

    def reset(self, name: str, offset: int) -> None:
        """Move a cursor."""
        super().reset(name, offset)
        if (real := self._real) is not None:
            with outside():
                real.cursors.reset(name, offset)

    def delete(self, name: str) -> None:
        """Delete a cursor."""
        super().delete(name)
        if (real := self._real) is not None:
            with outside():
                real.cursors.delete(name)

    def _store(self, name: str, token: str, offset: int) -> bool:
        is_held = super()._store(name, token, offset)
        if is_held and (real := self._real) is not None:
            results: SimpleQueue[ZbusError | None] = SimpleQueue()
            with outside():
                real.cursors.advance(name, self._tokens[token], offset, results.put)
                same(f"the position of {name!r}", None, waited(results))
        return is_held

    def _release(self, name: str, token: str) -> None:
        super()._release(name, token)
        if token in self._tokens and (real := self._real) is not None:
            with outside():
                real.cursors.release(name, self._tokens.pop(token))

    @property
    def _real(self) -> Log | None:
        return None if self._access.is_dead else self._both.real


def _fields(cursor: Cursor) -> tuple[str, int, tuple[str, ...], bool]:
    return cursor.name, cursor.offset, cursor.keys, cursor.owner is None


class RealPositions(SimPositions):
    """Positions in both logs."""

    def __init__(self, access: Access, disk: RealDisk) -> None:
        super().__init__(access)
        self._both = disk

    def load(self) -> dict[str, int]:
        """Return all positions by name."""
        found = super().load()
        if not self._access.is_dead and self._both.real is not None:
            with outside():
                same("the positions", found, self._both.real.positions.load())
        return found

    def store(self, changed: Mapping[str, int]) -> None:
        """Store positions. The real log stores them first: the step after it may be the last one of the process."""
        if self._access.is_writable() and self._both.real is not None:
            with outside():
                self._both.real.positions.store(changed)
        super().store(changed)

    def remove(self, names: Collection[str]) -> None:
        """Remove positions."""
        if self._access.is_writable() and self._both.real is not None:
            with outside():
                self._both.real.positions.remove(names)
        super().remove(names)


class RealSchemas(SimSchemas):
    """Schemas in both logs."""

    def __init__(self, access: Access, disk: RealDisk) -> None:
        super().__init__(access)
        self._both = disk

    def load(self) -> Sequence[Schema]:
        """Return all versions, by expression and version."""
        found = super().load()
        if not self._access.is_dead and self._both.real is not None:
            with outside():
                same("the schemas", list(found), list(self._both.real.schemas.load()))
        return found

    def store(self, schema: Schema) -> None:
        """Store one more version. Raises `LogError` if this version exists."""
        super().store(schema)
        if not self._access.is_dead and self._both.real is not None:
            with outside():
                self._both.real.schemas.store(schema)


def same(what: str, simulated: object, real: object) -> None:
    """Raise `LogsDiffer` unless both logs have the same."""
    if simulated != real:
        raise LogsDiffer(what, simulated, real)


def waited(results: SimpleQueue[Any]) -> Any:
    """Wait in real time for what a thread of the real log passes on."""
    try:
        return results.get(timeout=REAL_S)
    except Empty:
        raise WorldStuck(f"the real log did not reply within {REAL_S:g} s of real time") from None


if TYPE_CHECKING:
    _port: type[Log] = RealLog
    _page: type[Page] = RealPage
