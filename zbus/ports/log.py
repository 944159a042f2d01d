"""The log port: what the core needs from a log. `zbus.plugins` finds the implementation by name.

A log keeps events in order and makes them durable. It knows nothing of transports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from zbus.errors import LogError, ZbusError
from zbus.event import Event, Provenance
from zbus.headers import NO_HEADERS, Headers, raw_headers
from zbus.keys import KeySet


class Promise(NamedTuple):
    """What a log guarantees, as data: `bus.stats()` and `zbus doctor` show it."""

    durability: str  # what an acknowledged event survives: "power loss", "a crash of the process", "nothing"
    writers: str  # "one" process at a time, or "many"
    dense: bool  # offsets follow each other without gaps
    identities: str  # how long an identity is known: "as long as its event", or for a time such as "2 minutes"
    atomic_events: int | None  # how many events of one append are stored together or not at all; None: all of them


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One encoded event on its way into the log, without an offset yet."""

    publisher_id: int
    sequence: int
    published_at: int
    key: str
    payload: bytes
    headers: bytes | None = None
    provenance: Provenance | None = None  # None if it was published on this node; in a log, by this writer

    def event(self, offset: int = 0) -> Event:
        """Return the event at an offset."""
        headers = self.headers
        return Event(
            self.publisher_id,
            self.sequence,
            self.published_at,
            self.key,
            self.payload,
            Headers(headers) if headers else NO_HEADERS,
            offset,
            self.provenance,
        )


def row_of(event: Event) -> Row:
    """Return an event as a row."""
    return Row(
        event.publisher_id,
        event.sequence,
        event.published_at,
        event.key,
        event.payload,
        raw_headers(event.headers),
        event.provenance,
    )


class Stored(NamedTuple):
    """An append that is durable."""

    offsets: Sequence[int]  # one for each row, in order
    repeated: Collection[int] = ()  # the indexes of rows that were stored before, and not again


class Refused(NamedTuple):
    """An append of which nothing was stored."""

    error: LogError


class Unknown(NamedTuple):
    """An append that may or may not have been stored. Appending the same rows again is safe."""

    error: LogError


Outcome = Stored | Refused | Unknown


class AppendResult(NamedTuple):
    """The outcome of an append, with what its caller passed as `about`."""

    about: Any
    outcome: Outcome


# Called once, by the log's own thread, when the outcome of an append is known.
Appended = Callable[[AppendResult], None]

# Called once, by any thread, with the offsets of rows that another process wanted stored, or why they were not.
WriteDone = Callable[[Sequence[int] | ZbusError], None]


class Committed(NamedTuple):
    """Newly stored events, in the order of their offsets: a part of the log's tail."""

    rows: Sequence[Row]
    offsets: Sequence[int]


class Span(NamedTuple):
    """What to read: offsets over `after` up to `until`, and times from `from_ns` up to `to_ns`, both included."""

    after: int = 0
    until: int | None = None
    from_ns: int | None = None
    to_ns: int | None = None


class Page(Protocol):
    """A run of events as the log has them; decoding waits until somebody wants them."""

    covered: int  # every event asked for, up to this offset, is in this page or an earlier one; never before the span
    low_water: int  # everything up to this offset was removed by retention

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        """The events in order; the error that ends them early, if any; how many bad ones were skipped."""


class Cursor(NamedTuple):
    """The position of a durable subscription."""

    name: str
    offset: int
    keys: tuple[str, ...]
    updated_at_ns: int
    owner: str | None  # who holds the lease, such as "process 4711"; None if nobody does


class Lease(NamedTuple):
    """The right to acknowledge under a durable name, until it is released or its holder is gone."""

    token: str
    offset: int  # the stored position


class Cursors(Protocol):
    """Durable positions by name. They survive the process, and one reader at a time uses each."""

    def claim(self, name: str, keys: Sequence[str], start: int) -> Lease:
        """Take the lease of `name`; a new name starts at `start`. Raises `CursorError` if another holder has it."""

    def advance(
        self, name: str, token: str, offset: int, done: Callable[[ZbusError | None], None] | None = None
    ) -> None:
        """Store a position, never backwards, without waiting; `done` is called when it is on disk, or failed.

        It fails with `CursorError` if the lease of this token is no longer held.
        """

    def release(self, name: str, token: str) -> None:
        """Store what is pending for `name` and let others claim it."""

    def list(self) -> Sequence[Cursor]:
        """Every cursor, by name."""

    def reset(self, name: str, offset: int) -> None:
        """Move a cursor that nobody uses."""

    def delete(self, name: str) -> None:
        """Forget a cursor that nobody uses."""


class Positions(Protocol):
    """Numbers by name that survive the process. Losing the newest costs time, never events."""

    def load(self) -> dict[str, int]:
        """All of them."""

    def store(self, changed: Mapping[str, int]) -> None:
        """Store some."""


class Schema(NamedTuple):
    """One version of what the payloads of some keys must look like."""

    expression: str
    version: int  # from 1, for each expression
    mode: str  # "strict", "permissive", or "removed": from this version on there is none
    hash: str  # of the canonical JSON Schema: the same on every node
    schema: dict[str, Any]  # the JSON Schema
    registered_at_ns: int


class SchemaStore(Protocol):
    """Schemas that survive the process, every version of them. Both methods may block."""

    def load(self) -> Sequence[Schema]:
        """All of them, by expression and version."""

    def store(self, schema: Schema) -> None:
        """Keep one more version; returns once it is on disk. Raises a `LogError` if it is not kept."""


class Log(Protocol):
    """An append-only, ordered log of events.

    `append` and `accept_proxied_writes` never block. Methods that may block must not be called on the event loop.
    """

    path: str  # where it is, for messages: a path or a URL
    read_only: bool

    @property
    def promise(self) -> Promise:
        """What this log guarantees."""

    @property
    def cursors(self) -> Cursors:
        """The durable positions kept with this log."""

    @property
    def positions(self) -> Positions:
        """How far this node is with others, kept with this log."""

    @property
    def schemas(self) -> SchemaStore:
        """What is registered for the payloads of this log."""

    @property
    def log_id(self) -> int:
        """What tells this history from all others: odd, and 62 bits at most. After a loss it is another one."""

    @property
    def writer_id(self) -> int:
        """What tells this node's writes in the history from those of others; the same as `log_id` with one writer."""

    @property
    def append(self) -> Callable[[Sequence[Row], Appended, Any], None]:
        """`append(rows, done, about)`: queue rows for the next commit, without blocking.

        `done` is called from the log's thread with `about` and the outcome.
        """

    def tail(self, committed: Callable[[Committed], None]) -> int:
        """Call `committed`, from the log's thread, with every event after the returned offset. Does not block.

        Each comes once and in the order of offsets, those of other writers included, and before the append that stored
        it is answered. Delivery is fed from this, and from nothing else.
        """

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        """The next events of a span, at most `limit`; fewer, or none, do not mean that there are no more.

        A read may be stale: it does not show what was stored a moment ago, and `covered` then says so. Raises
        `LogTrimmed` if retention removed events after `span.after`, unless that is 0: the beginning of what is left.
        """

    def head(self) -> int:
        """The last committed offset that a read shows; 0 for an empty log. It may be stale, and never goes back."""

    def low_water(self) -> int:
        """Everything up to this offset was removed by retention."""

    def size_bytes(self) -> int:
        """Return the size of the log on disk. Any thread; it does not wait for the log."""

    def before(self, offset: int) -> int:
        """Return the position to read after, so that the next event is the one at `offset`. Does not block."""

    def count(self, after: int, until: int) -> int:
        """Return how many events were stored after offset `after` up to and including `until`, removed ones too.

        0 if `until` is not after `after`. Does not block; the most that it can be if the log cannot tell without
        reading.
        """

    def narrow(self, span: Span) -> Span:
        """The same span with its times turned into offsets as far as they go, and an end: the head of now.

        Nothing after `span.after` up to the new `after` was published at or after `from_ns`, and the event that follows
        was; if none was, the new `after` is the last offset. A start by time depends on it, so this is never stale.
        """

    def watch(self, moved: Callable[[int], None]) -> None:
        """Tell `moved` of the head whenever another process appended (a log that is read here only)."""

    def accept_proxied_writes(self, take: Callable[[Sequence[Row], WriteDone], None]) -> None:
        """From now on let other processes have rows stored here, through `take`; returns at once.

        `take` is called on a thread of the log: it only appends and wakes. Rows that are not answered when the log
        is closed are put again by those who wait for them.
        """

    def diagnostics(self) -> dict[str, Any]:
        """What this log is."""

    def close(self, timeout_s: float) -> None:
        """Store what was appended and let go of the file, in bounded time."""
