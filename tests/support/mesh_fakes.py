"""A fake fabric, log, clock and driver: the mesh on one thread, under virtual time, in milliseconds.

`FakeRuntime.advance(1.0)` runs every step that is due within the next second, in order. Nothing runs in between, and
nothing sleeps, so a test sees each state.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deliver_support import FakeHost

from zbus.errors import EventCorrupt, LogError, LogTrimmed, NoResponders, TransportError
from zbus.event import Event
from zbus.keys import KeySet
from zbus.mesh.inbox import Inbox
from zbus.mesh.interest import Interest
from zbus.mesh.log_service import LogPage
from zbus.observe import records
from zbus.ports.fabric import Fabric, OnReply, OnRequest, Receive, RequestHandle
from zbus.ports.lineage import Branch, Incarnation, Lineage, Mark
from zbus.ports.log import NO_CONFLICTS, Appended, Log, Page, Row, Span, Stored
from zbus.util.driver import Driver, OnError, Step
from zbus.util.runtime import Runtime
from zbus.wire.beacon import Beacon, decode_beacon
from zbus.wire.envelope import BEACON, EMPTY, MANY, ONE, Envelope, encode, open_frame

Frame = tuple[str, bytes]

OWN, OTHER = 2, 4  # even: nodes without a log


class ManualDriver:
    """Runs a step when the test says so. `due` is the time of the next one; None once the step is finished."""

    def __init__(self, step: Step, runtime: FakeRuntime) -> None:
        self._step, self._runtime = step, runtime
        self.steps = 0
        self.due: float | None = -math.inf

    def wake(self) -> None:
        if self.due is not None:
            self.due = -math.inf

    def run_due(self, steps_max: int = 10_000) -> None:
        """Run until nothing is due now."""
        for _ in range(steps_max):
            if self.due is None or self.due > self._runtime.now:
                return
            self.due = math.inf  # a wake-up during the step is not lost
            self.steps += 1
            due = self._step()
            self.due = due if due is None else min(due, self.due)
        raise AssertionError(f"{steps_max} steps in a row, and more are due")

    def join(self, timeout_s: float) -> bool:
        """Let virtual time pass until the step is finished."""
        deadline = self._runtime.now + timeout_s
        self.run_due()
        while self.due is not None and self.due <= deadline:
            self._runtime.now = max(self._runtime.now, self.due)
            self.run_due()
        return self.due is None


class FakeRuntime(Runtime):
    """Clocks that stand still until the test moves them, and no randomness: a pause is as long as it can be."""

    def __init__(self, now: float = 1000.0, epoch_ns: int = 1_700_000_000 * 10**9) -> None:
        super().__init__()
        self.now = now
        self.drivers: list[ManualDriver] = []
        self._zero, self._epoch_ns = now, epoch_ns
        self._drawn = 0
        self.monotonic = lambda: self.now
        self.monotonic_ns = lambda: round(self.now * 1e9)
        self.time_ns = lambda: self._epoch_ns + round((self.now - self._zero) * 1e9)
        self.uniform = lambda low, high: high
        self.randbits = self._draw
        self.token_hex = lambda count: f"{self._draw(count * 8):0{2 * count}x}"
        self.pid = lambda: 4711
        self.hostname = lambda: "fake"
        self.boot_id = lambda: "fake"
        self.clock_zero_ns = self.time_ns() - self.monotonic_ns()

    def driver(self, step: Step, name: str, on_error: OnError) -> Driver:
        self.drivers.append(ManualDriver(step, self))
        return self.drivers[-1]

    def executor(self, threads: int, name: str) -> Any:
        raise AssertionError(f"{name}: nothing runs on a thread here")

    def thread(self, target: Callable[[], Any], name: str) -> Any:
        raise AssertionError(f"{name}: nothing runs on a thread here")

    def run_due(self) -> None:
        """Run every step that is due now."""
        for driver in self.drivers:
            driver.run_due()

    def advance(self, seconds: float) -> None:
        """Let time pass, and run each step when it is due."""
        end = self.now + seconds
        self.run_due()
        while (due := self._next_due()) <= end:
            self.now = max(self.now, due)
            self.run_due()
        self.now = end

    def _next_due(self) -> float:
        return min((driver.due for driver in self.drivers if driver.due is not None), default=math.inf)

    def _draw(self, bits: int) -> int:
        self._drawn += 1
        return self._drawn % (1 << bits)


class FakeFabric:
    """Keeps the frames that it was given. It fails while `error` is set, and has a subscriber while `subscribed` is."""

    def __init__(self, *, events_only: bool = False) -> None:
        self.name, self.networked, self.events_only, self.dense = "fake", True, events_only, True
        self.trust = "none"
        self.endpoints: Sequence[str] = ()
        self.error: BaseException | None = None
        self.ready_error: Exception | None = None
        self.subscribed = True
        self.frames: list[Frame] = []
        self.calls: list[list[Frame]] = []  # of `send`, including those that failed
        self.during_send: Callable[[], object] = lambda: None  # runs while the frames are in flight
        self.ready_keys: list[str] = []
        self.listening: Sequence[str] = ()
        self.receive: Receive | None = None
        self.closed = False

    def send(self, frames: Sequence[Frame]) -> None:
        self.calls.append(list(frames))
        self.during_send()
        if self.error is not None:
            raise self.error
        self.frames += frames

    def disconnect(self, reason: str = "no connection") -> None:
        self.error = TransportError(reason)

    def connect(self) -> None:
        self.error = None

    def ready(self, key: str) -> bool:
        self.ready_keys.append(key)
        if self.ready_error is not None:
            raise self.ready_error
        return self.subscribed

    @property
    def envelopes(self) -> list[Envelope]:
        return [each for _, frame in self.frames if frame[0] in (ONE, MANY) for each in open_frame(frame)]

    @property
    def sequences(self) -> list[int]:
        return [envelope.sequence for envelope in self.envelopes]

    @property
    def offsets(self) -> list[int]:
        return [envelope.offset for envelope in self.envelopes]

    @property
    def beacons(self) -> list[Beacon]:
        return [decode_beacon(frame) for _, frame in self.frames if frame[0] == BEACON]

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        self.listening, self.receive = expressions, receive

    def check(self, key: str) -> None:
        pass

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        pass

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        raise TransportError("a fake fabric carries no requests")

    def diagnostics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed = True


class FakePage:
    def __init__(self, events: list[Event | int], covered: int, low_water: int) -> None:
        self._events, self.covered, self.low_water = events, covered, low_water

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        found: list[Event] = []
        skipped = 0
        for each in self._events:
            if isinstance(each, Event):
                found.append(each)
            elif not skip_corrupt:
                return found, EventCorrupt(each, "bad checksum"), skipped
            else:
                skipped += 1
        return found, None, skipped


class FakeLog:
    """A log in a list. With `stride` over 1 its offsets have gaps, so that arithmetic with them goes wrong."""

    path, read_only = "fake", False

    lineage = Lineage((Incarnation(3, 1),))

    def __init__(self, stride: int = 1, origin: int = 3) -> None:
        self.stride, self.origin = stride, origin
        self.error: LogError | None = None
        self.reads: list[int] = []  # after which offset
        self.during_read: Callable[[], object] = lambda: None  # runs after a page was read
        self._events: list[Event | int] = []  # an offset stands for a corrupt event
        self._offsets: list[int] = []
        self._low_water = 0
        self.hidden = 0  # how many of the newest events a read does not show yet

    def digest(self, offset: int) -> bytes:
        return b"%d" % offset

    def append(self, rows: Sequence[Row], done: Appended) -> None:
        done(self.store(rows))

    def store(self, rows: Sequence[Row]) -> list[int]:
        """Commit rows; return their offsets."""
        offsets: list[int] = []
        for row in rows:
            offsets.append((len(self._events) + 1) * self.stride)
            self._events.append(row.event(offsets[-1]))
        self._offsets += offsets
        return offsets

    def corrupt(self, offset: int) -> None:
        self._events[self._offsets.index(offset)] = offset

    def trim(self, low_water: int) -> None:
        """Let retention remove everything up to this offset."""
        self._low_water = low_water

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        self.reads.append(span.after)
        if self.error is not None:
            raise self.error
        if span.after < self._low_water:
            raise LogTrimmed(span.after, self._low_water)
        first = bisect.bisect_right(self._offsets, span.after)
        shown = bisect.bisect_right(self._offsets, span.until or self.head())
        last = min(first + limit, shown, len(self._offsets) - self.hidden)
        covered = self._offsets[last - 1] if last > first else span.after
        page = FakePage(self._events[first:last], covered, self._low_water)
        self.during_read()
        return page

    def head(self) -> int:
        return self._offsets[-1] if self._offsets else 0

    def hold(self, reader: tuple[str, int] | None) -> None:
        self.reader = reader

    def low_water(self) -> int:
        return self._low_water

    def removed_until(self) -> int:
        return 0

    def count(self, after: int, until: int) -> int:
        return bisect.bisect_right(self._offsets, until) - bisect.bisect_right(self._offsets, after)

    def narrow(self, span: Span) -> Span:
        return span._replace(until=self.head() if span.until is None else span.until)

    def watch(self, moved: Callable[[int], None]) -> None:
        raise NotImplementedError

    def accept_proxied_writes(self, take: Callable[..., None]) -> None:
        raise NotImplementedError

    def diagnostics(self) -> dict[str, Any]:
        return {}

    def close(self, timeout_s: float) -> None:
        pass

    @property
    def cursors(self) -> Any:
        raise NotImplementedError

    @property
    def positions(self) -> Any:
        raise NotImplementedError

    @property
    def schemas(self) -> Any:
        raise NotImplementedError


class FakeStores:
    """Stores nothing; the test says when rows are stored."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.batches: list[list[Row]] = []
        self.storing: list[asyncio.Future[Stored]] = []

    def add_many(self, rows: Sequence[Row]) -> asyncio.Future[Stored]:
        self.rows += rows
        self.batches.append(list(rows))
        self.storing.append(asyncio.get_running_loop().create_future())
        return self.storing[-1]

    def store(self, at: int = -1, repeated: Sequence[int] = (), conflicts: Mapping[int, str] = NO_CONFLICTS) -> None:
        """Report that a batch, by default the last one, was stored."""
        self.storing[at].set_result(Stored(range(1, len(self.batches[at]) + 1), repeated, conflicts))


class MeshHost(FakeHost):
    """What the mesh needs from a node, and the network that its inbox needs."""

    run = None

    def __init__(self) -> None:
        super().__init__()
        self.commits = FakeStores()
        self.beacons: list[int] = []
        self.announcements: list[bytes] = []
        self.cancelled: list[int] = []
        self.forwarded: list[Row] = []
        self.forwarded_over: list[str] = []
        self.forwarded_when_stored: list[tuple[list[Row], str, object]] = []
        self.remote_log: list[Envelope] = []  # of every other node; None of them replies while it is empty
        self.described: list[tuple[int, dict[int, int]]] = []
        self.page_requests: list[tuple[int, int, int, str, Sequence[str] | None]] = []
        self.interest = Interest()
        self.beacon_received = lambda origin, incarnation: self.beacons.append(origin)
        self.request_cancelled = self.cancelled.append

    def announcement_received(self, frame: bytes, link: str) -> None:
        self.announcements.append(frame)

    def forward_unstored(self, rows: Sequence[Row], link: str) -> None:
        self.forwarded += rows
        self.forwarded_over.append(link)

    def forward_when_stored(self, rows: Sequence[Row], link: str, storing: object) -> None:
        self.forwarded_when_stored.append((list(rows), link, storing))

    def is_copy(self, branch: Branch, offset: int, digest: bytes = b"") -> bool:
        return False

    def is_refused(self, origin: int, incarnation: int) -> bool:
        return False

    async def describe(self, origin: int, incarnation: int, link: str, known: Mapping[int, int]) -> LogPage:
        self.described.append((origin, dict(known)))
        if not self.remote_log:
            raise NoResponders(f"@zbus/log/{origin:x}")
        head = self.remote_log[-1].offset
        return LogPage([], head, head, 0)

    async def page(
        self,
        origin: int,
        after: int,
        from_ns: int,
        link: str,
        expressions: Sequence[str] | None = None,
        incarnation: int = 0,
        mark: Mark | None = None,
    ) -> LogPage:
        self.page_requests.append((origin, after, from_ns, link, expressions))
        if not self.remote_log:
            raise NoResponders(f"@zbus/log/{origin:x}")
        head = self.remote_log[-1].offset
        return LogPage([each for each in self.remote_log if each.offset > after], head, head, 0, 0)

    def inbox(self, forwards: bool = False) -> Inbox:
        return Inbox(self, self, OWN, self.interest, 1000, forwards, self.runtime)  # type: ignore[arg-type]

    def frame(self, key: str, payload: bytes = b"") -> bytes:
        (row,) = self.rows(1, 3, key, payload)
        return encode(row.event())


async def turns(number: int = 10) -> None:
    """Let everything run that needs no time to pass."""
    for _ in range(number):
        await asyncio.sleep(0)


class Counts(Counter[str]):
    """Counters, in the shape that components call: `counts.add("name", 3)`. They appear once they differ from 0."""

    def add(self, name: str, events: int) -> None:
        if events:
            self[name] += events


def rows(sequences: Sequence[int], key: str = "shop/orders", publisher_id: int = 7, payload: bytes = b"x") -> list[Row]:
    """Encoded events of one publisher."""
    return [Row(publisher_id, sequence, 1_000 + sequence, key, payload, None) for sequence in sequences]


def envelope(offset: int, previous: int = 0, key: str = "shop/orders", **fields: Any) -> Envelope:
    """An event of another node. Its sequence is its offset unless given."""
    sequence = fields.pop("sequence", offset)
    values = {
        "publisher_id": 7,
        "published_at": 1_000 + sequence,
        "payload": b"x",
        "headers": EMPTY,
        "origin": 5,
    } | fields
    return Envelope(
        sequence=sequence, topic=key.rpartition("/")[2], key=key, offset=offset, previous=previous, **values
    )


@contextmanager
def recorded(level: int = logging.DEBUG) -> Iterator[list[dict[str, Any]]]:
    """The fields of the log records that are written meanwhile, without their correlation ids."""
    found: list[dict[str, Any]] = []

    def listen(level: int, fields: dict[str, Any]) -> None:
        found.append({"level": level} | {name: value for name, value in fields.items() if name != "correlation_id"})

    stop = records.listen(level, listen)
    try:
        yield found
    finally:
        stop()


if TYPE_CHECKING:
    _fabric: type[Fabric] = FakeFabric
    _log: type[Log] = FakeLog
    _driver: type[Driver] = ManualDriver
