"""A log with many writers, in memory, that behaves as badly as the log port allows.

`History` is what a cluster would keep: one order of events, the leases, the schemas. `FakeLane` is one writer's lane
into it, with a thread of its own. Offsets have gaps. Reads are stale: each one shows only a little more than the last.
An append can lose its answer, whether it was stored or not, or be stored in part. A lease ends if its holder is silent
for too long by the clock of the history. `count` never knows more than it must.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from zbus.errors import CursorError, LogError, LogReadOnly, LogTrimmed, ZbusError
from zbus.event import Event, Provenance
from zbus.keys import KeySet
from zbus.observe.records import record_reason
from zbus.ports.lineage import Incarnation, Lineage
from zbus.ports.log import (
    Appended,
    AppendResult,
    Backup,
    Committed,
    Cursor,
    Lease,
    Outcome,
    Page,
    Promise,
    ProxiedWrite,
    Purged,
    Refused,
    Row,
    Schema,
    Span,
    Stored,
    Unknown,
)

ATOMIC_EVENTS = 100
IDENTITIES_S = 120.0
LEASE_S = 30.0
SHOWN_EVENTS = 40  # by which one read shows more than the one before
SCANNED_EVENTS = 60  # a page looks no further
NAME_MAX = 200

# What happens to an append, in place of being stored and answered.
Fault = Literal["refused", "stored, answer lost", "lost", "stored in part, answer lost"]


class Entry(NamedTuple):
    """One stored event, and the lane that it came by."""

    offset: int
    row: Row
    writer_id: int


class History:
    """What all lanes share. It outlives each of them."""

    def __init__(self, seed: int = 7) -> None:
        self.lock = threading.RLock()
        self.log_id = secrets.randbits(61) | 1
        self.entries: list[Entry] = []
        self.offsets: list[int] = []
        self.low_water = 0
        self.purged: set[int] = set()
        self.lanes: list[FakeLane] = []
        self.cursors: dict[str, _Cursor] = {}
        self.positions: dict[str, dict[str, int]] = {}  # by the name of a lane
        self.writer_ids: dict[str, int] = {}
        self.schemas: list[Schema] = []
        self.incarnations: list[Incarnation] = []
        self.now = 0.0  # the clock of the history, in seconds
        self._gaps = random.Random(seed)
        self._identities: dict[tuple[int, int], tuple[int, float]] = {}  # the offset, and when it was stored

    def open(self, lane: str = "a", *, read_only: bool = False) -> FakeLane:
        """Open a lane."""
        with self.lock:
            if not read_only:
                self.begin_incarnation()
            opened = FakeLane(self, lane, read_only=read_only)
            self.lanes.append(opened)
        return opened

    def begin_incarnation(self) -> Incarnation:
        """Begin an incarnation of all lanes."""
        with self.lock:
            first = (self.offsets[-1] if self.offsets else 0) + 1
            begun = Incarnation(secrets.randbits(61) + 1, first, time.time_ns(), "fake")
            self.incarnations.append(begun)
            return begun

    def digest(self, offset: int) -> bytes:
        """Hash the events up to an offset; removed ones are kept for it."""
        with self.lock:
            if offset > (self.offsets[-1] if self.offsets else 0):
                return b""
            upto = bisect.bisect_right(self.offsets, offset)
            return hashlib.blake2b(msgspec.msgpack.encode(self.entries[:upto]), digest_size=16).digest()

    def store(self, rows: Sequence[Row], writer_id: int) -> Stored:
        """Store what is new of some rows, together."""
        offsets: list[int] = []
        repeated: set[int] = set()
        conflicts: dict[int, str] = {}
        with self.lock:
            for index, row in enumerate(rows):
                known = self._identities.get((row.publisher_id, row.sequence))
                if known is not None and self.now - known[1] < IDENTITIES_S:
                    stored = self.entries[bisect.bisect_left(self.offsets, known[0])].row
                    is_there = known[0] > self.low_water and known[0] not in self.purged
                    if is_there and (stored.key, stored.payload) != (row.key, row.payload):
                        conflicts[index] = stored.key
                    offsets.append(known[0])
                    repeated.add(index)
                    continue
                offset = (self.offsets[-1] if self.offsets else 0) + self._gaps.choice((1, 2, 3, 17))
                self._identities[row.publisher_id, row.sequence] = (offset, self.now)
                self.entries.append(Entry(offset, row, writer_id))
                self.offsets.append(offset)
                offsets.append(offset)
            for lane in self.lanes:
                lane.notify()
        return Stored(offsets, repeated, conflicts)

    def trim(self, until: int) -> None:
        """Let retention remove everything up to an offset."""
        with self.lock:
            self.low_water = max(self.low_water, until)

    def pass_time(self, seconds: float) -> None:
        """Move the clock. Lanes that are not silent renew their leases meanwhile."""
        with self.lock:
            self.now += seconds
            for cursor in self.cursors.values():
                if cursor.token is not None and cursor.holder is not None and not cursor.holder.silent:
                    cursor.until = self.now + LEASE_S
                elif cursor.until <= self.now:
                    cursor.token = cursor.holder = None


class FakeLane:
    """One writer's lane into a history."""

    def __init__(self, history: History, lane: str, *, read_only: bool) -> None:
        self.history, self.lane, self.read_only = history, lane, read_only
        self.path = f"fake://{lane}"
        self._writer_id = history.writer_ids.setdefault(lane, secrets.randbits(61) | 1)
        self.faults: deque[Fault] = deque()  # for the next appends, in order
        self.held = threading.Event()  # while it is cleared, appends wait
        self.held.set()
        self.silent = False  # as if the process hung: its leases are not renewed
        self._shown = 0  # how many events reads have shown
        self._tail: Callable[[Committed], None] | None = None
        self._tailed = 0  # how many events the tail had
        self._watch: Callable[[int], None] | None = None
        self._closed = False
        self._cursors, self._positions, self._schemas = FakeCursors(self), FakePositions(self), FakeSchemas(self)
        self._inbox: SimpleQueue[tuple[Sequence[Row], Appended, Any] | Callable[[], None] | bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"zbus-fake-log-{lane}", daemon=True)
        self._thread.start()

    @property
    def promise(self) -> Promise:
        return Promise("power loss", "many", False, f"{IDENTITIES_S / 60:.0f} minutes", ATOMIC_EVENTS)

    @property
    def cursors(self) -> FakeCursors:
        return self._cursors

    @property
    def positions(self) -> FakePositions:
        return self._positions

    @property
    def schemas(self) -> FakeSchemas:
        return self._schemas

    @property
    def log_id(self) -> int:
        return self.history.log_id

    @property
    def writer_id(self) -> int:
        return self._writer_id

    @property
    def lineage(self) -> Lineage:
        with self.history.lock:
            return Lineage(tuple(self.history.incarnations))

    def begin_incarnation(self) -> Incarnation:
        if self.read_only:
            raise LogReadOnly(self.path)
        begun: SimpleQueue[Incarnation] = SimpleQueue()
        self.soon(lambda: begun.put(self.history.begin_incarnation()))  # after the appends that wait
        return begun.get(timeout=5.0)

    def digest(self, offset: int) -> bytes:
        return self.history.digest(offset)

    is_fork = False

    def backup(self, target: str, progress: Any = None, check: Any = None) -> Backup:
        raise LogError("a fake log has no backups")

    def purge(self, keys: KeySet, progress: Any = None) -> Purged:
        if self.read_only:
            raise LogReadOnly(self.path)
        history = self.history
        with history.lock:
            stored = [each for each in history.entries if each.offset not in history.purged]
            gone = {each.offset for each in stored if each.row.key in keys and each.offset > history.low_water}
            history.purged |= gone
            return Purged(len(gone), history.offsets[-1] if history.offsets else 0)

    def append(self, rows: Sequence[Row], done: Appended, about: Any) -> None:
        if self.read_only:
            done(AppendResult(about, Refused(LogReadOnly(self.path))))
        elif self._closed:
            done(AppendResult(about, Refused(LogError(f"{self.path} is closed"))))
        else:
            self._inbox.put((rows, done, about))

    def tail(self, committed: Callable[[Committed], None]) -> int:
        with self.history.lock:
            self._tail, self._tailed = committed, len(self.history.entries)
            return self.history.offsets[-1] if self.history.offsets else 0

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        with self.history.lock:
            low_water, shown = self.history.low_water, self._show_more()
            if 0 < span.after < low_water:
                raise LogTrimmed(span.after, low_water)
            first = bisect.bisect_right(self.history.offsets, max(span.after, low_water))
            end = bisect.bisect_right(self.history.offsets, span.until) if span.until is not None else shown
            end = min(end, shown)
            found: list[Event] = []
            covered = max(span.after, low_water)
            for entry in self.history.entries[first : min(end, first + SCANNED_EVENTS)]:
                covered = entry.offset
                if entry.offset not in self.history.purged and entry.row.key in keys and _in_time(entry.row, span):
                    found.append(self._seen_here(entry).event(entry.offset))
                    if len(found) == limit:
                        break
            else:
                if span.until is not None and first + SCANNED_EVENTS >= end and self._is_shown(span.until, shown):
                    covered = max(covered, span.until)  # nothing is between the last event and the end
            return FakePage(found, covered, low_water)

    def head(self) -> int:
        with self.history.lock:
            shown = self._show_more()
            return self.history.offsets[shown - 1] if shown else 0

    def hold(self, reader: tuple[str, int] | None) -> None:
        self.reader = reader

    def low_water(self) -> int:
        return self.history.low_water

    def removed_until(self) -> int:
        return 0

    def size_bytes(self) -> int:
        return sum(len(entry.row.payload) for entry in self.history.entries)

    def before(self, offset: int) -> int:
        return max(0, offset - 1)

    def count(self, after: int, until: int) -> int:
        return max(0, until - after)  # the most that it can be

    def narrow(self, span: Span) -> Span:
        head = self.head()
        until = head if span.until is None else min(span.until, head)
        if span.from_ns is None:
            return span._replace(until=until)
        with self.history.lock:
            stored = [each for each in self.history.entries if each.offset not in self.history.purged]
            late = [each.offset for each in stored if each.row.published_at >= span.from_ns]
            last = self.history.offsets[-1] if self.history.offsets else 0
        after = max(span.after, late[0] - 1 if late else last)
        return span._replace(after=after, until=max(after, until))

    def watch(self, moved: Callable[[int], None]) -> None:
        self._watch = moved
        self.notify()

    def accept_proxied_writes(self, write: ProxiedWrite) -> None:
        pass  # other processes have lanes of their own

    def diagnostics(self) -> dict[str, Any]:
        return {"log": self.path, "head": self.head(), "low_water": self.low_water(), "read_only": self.read_only}

    def close(self, timeout_s: float) -> None:
        self._closed = True
        self._inbox.put(True)
        self._thread.join(timeout_s)
        self._cursors.release_all()
        with self.history.lock:
            if self in self.history.lanes:
                self.history.lanes.remove(self)

    # For tests.

    def crash(self) -> None:
        """End without releasing anything."""
        self.silent = self._closed = True
        self._inbox.put(True)
        self._thread.join(5.0)
        with self.history.lock:
            self.history.lanes.remove(self)

    # What the history and the parts of this log call.

    def notify(self) -> None:
        """There is something for the tail. Any thread."""
        self._inbox.put(False)

    def soon(self, call: Callable[[], None]) -> None:
        """Let the lane's thread call this."""
        self._inbox.put(call)

    def _run(self) -> None:
        while (item := self._inbox.get()) is not True:
            if callable(item):
                item()
            elif isinstance(item, tuple):
                rows, done, about = item
                self.held.wait()
                outcome = self._store(rows)
                self._feed_tail()
                done(AppendResult(about, outcome))
            else:
                self._feed_tail()

    def _store(self, rows: Sequence[Row]) -> Outcome:
        fault = self.faults.popleft() if self.faults else None
        lost = LogError(f"{self.path} did not answer")
        if fault == "refused":
            return Refused(LogError(f"{self.path} is full"))
        if fault == "lost":
            return Unknown(lost)
        parts = [rows[at : at + ATOMIC_EVENTS] for at in range(0, len(rows), ATOMIC_EVENTS)]
        offsets: list[int] = []
        repeated: set[int] = set()
        conflicts: dict[int, str] = {}
        for part in parts:
            stored = self.history.store(part, self._writer_id)
            repeated |= {len(offsets) + index for index in stored.repeated}
            conflicts |= {len(offsets) + index: key for index, key in stored.conflicts.items()}
            offsets += stored.offsets
            if fault == "stored in part, answer lost":
                return Unknown(lost)
        return Unknown(lost) if fault is not None else Stored(offsets, repeated, conflicts)

    def _feed_tail(self) -> None:
        with self.history.lock:
            new = self.history.entries[self._tailed :] if self._tail is not None else []
            self._tailed += len(new)
            head = self.history.offsets[-1] if self.history.offsets else 0
        if new and self._tail is not None:
            self._tail(Committed([self._seen_here(entry) for entry in new], [entry.offset for entry in new]))
        if self._watch is not None and head:
            self._watch(head)

    def _seen_here(self, entry: Entry) -> Row:
        """The row; one of another lane says so."""
        if entry.writer_id == self._writer_id or entry.row.provenance is not None:
            return entry.row
        return replace(entry.row, provenance=Provenance(entry.writer_id, entry.offset, (), ""))

    def _is_shown(self, offset: int, shown: int) -> bool:
        """Whether reads show everything up to an offset."""
        return shown > 0 and offset <= self.history.offsets[shown - 1]

    def _show_more(self) -> int:
        self._shown = min(len(self.history.entries), self._shown + SHOWN_EVENTS)
        return self._shown


class FakePage:
    """A page; nothing in it is corrupt."""

    def __init__(self, found: list[Event], covered: int, low_water: int) -> None:
        self._found, self.covered, self.low_water = found, covered, low_water

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        return self._found, None, 0


class _Cursor:
    def __init__(self, offset: int) -> None:
        self.offset, self.keys, self.updated_at = offset, (), 0
        self.token: str | None = None
        self.holder: FakeLane | None = None
        self.until = 0.0  # when the lease ends, unless it is renewed

    keys: tuple[str, ...]

    @property
    def is_held(self) -> bool:
        return self.token is not None


class FakeCursors:
    """The cursors of the history, as one lane uses them."""

    def __init__(self, lane: FakeLane) -> None:
        self._lane, self._all = lane, lane.history.cursors

    def claim(self, name: str, keys: Sequence[str], start: int) -> Lease:
        if not isinstance(name, str) or not name or len(name) > NAME_MAX or not name.isprintable():
            raise CursorError(str(name), "it is not printable")
        with self._lane.history.lock:
            cursor = self._all.get(name)
            if cursor is not None and cursor.is_held:
                raise CursorError(name, f"{_holder(cursor)} holds its lease; it can have one subscriber at a time")
            before = () if cursor is None else cursor.keys
            if cursor is None:
                cursor = self._all[name] = _Cursor(start)
                cursor.updated_at = time.time_ns()
            cursor.token, cursor.holder, cursor.keys = secrets.token_hex(8), self._lane, tuple(keys)
            cursor.until = self._lane.history.now + LEASE_S
            return Lease(cursor.token, cursor.offset, before)

    def advance(
        self, name: str, token: str, offset: int, done: Callable[[ZbusError | None], None] | None = None
    ) -> None:
        if self._lane._closed:
            if done is not None:
                done(LogError(f"{self._lane.path} is closed; the position was not stored"))
            return

        def store() -> None:
            with self._lane.history.lock:
                cursor = self._all.get(name)
                held = cursor is not None and cursor.token == token and cursor.is_held
                if cursor is not None and held and offset > cursor.offset:
                    cursor.offset, cursor.updated_at = offset, time.time_ns()
            if not held:
                reason = "its lease has expired"
                record_reason("LEASE_LOST", logging.WARNING, code="lease_lost", reason=reason, durable=name)
            if done is not None:
                done(None if held else CursorError(name, "its lease has ended; the position was not stored"))

        self._lane.soon(store)

    def release(self, name: str, token: str) -> None:
        stored = threading.Event()
        self._lane.soon(stored.set)  # after the positions that wait
        stored.wait(5.0)
        with self._lane.history.lock:
            cursor = self._all.get(name)
            if cursor is not None and cursor.token == token:
                cursor.token = cursor.holder = None

    def list(self) -> Sequence[Cursor]:
        with self._lane.history.lock:
            return [
                Cursor(name, each.offset, each.keys, each.updated_at, _holder(each) if each.is_held else None)
                for name, each in sorted(self._all.items())
            ]

    def reset(self, name: str, offset: int) -> None:
        with self._lane.history.lock:
            self._unused(name).offset = offset

    def delete(self, name: str) -> None:
        with self._lane.history.lock:
            self._unused(name)
            del self._all[name]

    def release_all(self) -> None:
        """A lane that is closed holds nothing."""
        with self._lane.history.lock:
            for cursor in self._all.values():
                if cursor.holder is self._lane:
                    cursor.token = cursor.holder = None

    def _unused(self, name: str) -> _Cursor:
        cursor = self._all.get(name)
        if cursor is None:
            raise CursorError(name, "there is no such cursor")
        if cursor.is_held:
            raise CursorError(name, f"{_holder(cursor)} uses it; stop that process first")
        return cursor


class FakePositions:
    """The positions of one lane."""

    def __init__(self, lane: FakeLane) -> None:
        self._lane, self._all = lane, lane.history.positions.setdefault(lane.lane, {})

    def load(self) -> dict[str, int]:
        with self._lane.history.lock:
            return dict(self._all)

    def store(self, changed: Mapping[str, int]) -> None:
        with self._lane.history.lock:
            self._all |= changed

    def remove(self, names: Collection[str]) -> None:
        with self._lane.history.lock:
            for name in names:
                self._all.pop(name, None)


class FakeSchemas:
    """The schemas of the history."""

    def __init__(self, lane: FakeLane) -> None:
        self._lane = lane

    def load(self) -> Sequence[Schema]:
        with self._lane.history.lock:
            return sorted(self._lane.history.schemas, key=lambda each: (each.expression, each.version))

    def store(self, schema: Schema) -> None:
        if self._lane.read_only:
            raise LogReadOnly(self._lane.path)
        with self._lane.history.lock:
            self._lane.history.schemas.append(schema)


def _holder(cursor: _Cursor) -> str:
    return f"lane {cursor.holder.lane}" if cursor.holder is not None else "nobody"


def _in_time(row: Row, span: Span) -> bool:
    return (span.from_ns is None or row.published_at >= span.from_ns) and (
        span.to_ns is None or row.published_at <= span.to_ns
    )


if TYPE_CHECKING:
    from zbus.ports.log import Cursors, Log, Positions, SchemaStore

    _log: type[Log] = FakeLane
    _cursors: type[Cursors] = FakeCursors
    _positions: type[Positions] = FakePositions
    _schemas: type[SchemaStore] = FakeSchemas
