"""The log port: the protocol between the core and a log. `zbus.plugins` finds the implementation by name.

A log stores events durably and in order. It does not depend on transports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from zbus.errors import IdentityConflict, LogError, ZbusError
from zbus.event import Event, Provenance
from zbus.headers import NO_HEADERS, Headers, raw_headers
from zbus.keys import KeySet

from .lineage import Incarnation, Lineage


class Promise(NamedTuple):
    """The guarantees of a log, as data. `bus.stats()` and `zbus doctor` show them."""

    durability: str  # an acknowledged event survives: "power loss", "a crash of the process", "nothing"
    writers: str  # "one" process at a time, or "many"
    dense: bool  # offsets are consecutive, without gaps
    identities: str  # how long an identity is remembered: "as long as its event, then 7 days", or "2 minutes"
    atomic_events: int | None  # how many events of one append are stored atomically; None: all of them


def identities_promise(dedup_s: float) -> str:
    """Return `Promise.identities` of a log that remembers the identity of a removed event for `dedup_s` seconds.

    >>> identities_promise(604_800), identities_promise(90)
    ('as long as its event, then 7 days', 'as long as its event, then 90 seconds')
    """
    if not dedup_s:
        return "as long as its event"
    units = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1}
    unit = next((unit for unit, length in units.items() if dedup_s % length == 0 and dedup_s > length), "seconds")
    return f"as long as its event, then {dedup_s / units[unit]:g} {unit}"


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One encoded event before it is stored, and so without an offset."""

    publisher_id: int
    sequence: int
    published_at: int
    key: str
    payload: bytes
    headers: bytes | None = None
    provenance: Provenance | None = None  # None if this node (in a log: this writer) published it

    def event(self, offset: int = 0) -> Event:
        """Return the row as the event at an offset."""
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


NO_CONFLICTS: Mapping[int, str] = MappingProxyType({})


class Stored(NamedTuple):
    """Outcome of an append that is durable."""

    offsets: Sequence[int]  # one for each row, in order
    # The indexes of rows whose identity was already stored: nothing is stored for them, and their offset is that of the
    # stored event. If that event was removed, the low-water mark stands for its offset.
    repeated: Collection[int] = ()
    # Those of `repeated` for which the stored event is another one, with another key or payload, and its key. The
    # caller must report them. They cannot be recognized once retention has removed the stored event.
    conflicts: Mapping[int, str] = NO_CONFLICTS


def identity_conflict(rows: Sequence[Row], stored: Stored) -> IdentityConflict | None:
    """Return the error for those rows of this node that conflict with stored events, or None if there are none.

    Received rows are not the fault of the caller: they are left to `Stored.conflicts`.
    """
    own = [index for index in stored.conflicts if rows[index].provenance is None]
    if not own:
        return None
    row = rows[own[0]]
    error = IdentityConflict(row.publisher_id, row.sequence, stored.conflicts[own[0]], stored.offsets[own[0]])
    error.events = tuple([rows[index].event() for index in own])
    return error


class Refused(NamedTuple):
    """Outcome of an append that stored nothing. The error states only the cause: its `outcome` states the rest."""

    error: LogError


class Unknown(NamedTuple):
    """Outcome of an append that may or may not have been stored. Appending the same rows again is safe."""

    error: LogError


Outcome = Stored | Refused | Unknown


class AppendResult(NamedTuple):
    """The outcome of an append, with the `about` of its caller."""

    about: Any
    outcome: Outcome
    committed: Committed | None = None  # the new events, if the callback is the log's tail too, which then gets both


# The log's thread calls it once, when the outcome of an append is known.
Appended = Callable[[AppendResult], None]

# Called once, by any thread, with the offsets of the rows of a proxied write, or with the error that rejected them.
WriteDone = Callable[[Sequence[int] | ZbusError], None]

# Returns whether a process still waits for a proxied write. Fast and may be called by any thread.
IsWanted = Callable[[], bool]

# Called with the rows of a proxied write.
ProxiedWrite = Callable[[Sequence[Row], WriteDone, IsWanted], None]


class Committed(NamedTuple):
    """Newly stored events in the order of their offsets: a part of the log's tail."""

    rows: Sequence[Row]
    offsets: Sequence[int]


class Span(NamedTuple):
    """A range to read: offsets after `after` up to `until`, and times from `from_ns` to `to_ns`, both included."""

    after: int = 0
    until: int | None = None
    from_ns: int | None = None
    to_ns: int | None = None


class Page(Protocol):
    """A range of events as stored in the log. `events` decodes them."""

    covered: int  # all matching events up to this offset are in this page or an earlier one; never before the span
    low_water: int  # everything up to this offset was removed by retention

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        """Return the events in order, the error that ends them early (or None), and the number of events skipped."""


class Cursor(NamedTuple):
    """The position of a durable subscription."""

    name: str
    offset: int
    keys: tuple[str, ...]
    updated_at_ns: int
    owner: str | None  # the holder of the lease, such as "process 4711"; None if it is free
    incarnation: int = 0  # the one that stored the event at `offset`; 0 if that was not recorded
    expired_at_ns: int | None = None  # when it expired, because nothing used it


class Lease(NamedTuple):
    """The right to acknowledge for a durable subscription, until it is released or its holder ends."""

    token: str
    offset: int  # the stored position
    keys: tuple[str, ...]  # the key expressions under which it was reached; empty if the name is new


class Cursors(Protocol):
    """The cursors of durable subscriptions, by name. They survive the process; each has one subscriber at a time."""

    def claim(self, name: str, keys: Sequence[str], start: int) -> Lease:
        """Take the lease of `name`; a new name starts at `start`.

        Raises `CursorError` if another holder has it, or if its position is not in this log's lineage.
        """

    def advance(
        self, name: str, token: str, offset: int, done: Callable[[ZbusError | None], None] | None = None
    ) -> None:
        """Queue a position, never backwards. Does not block. `done` is called when it is on disk or failed.

        It fails with `CursorError` if the lease of this token is no longer held.
        """

    def release(self, name: str, token: str) -> None:
        """Store the pending positions of `name` and release its lease."""

    def list(self) -> Sequence[Cursor]:
        """Return every cursor, by name."""

    def reset(self, name: str, offset: int) -> None:
        """Move a cursor. Raises `CursorError` if a subscriber uses it."""

    def delete(self, name: str) -> None:
        """Delete a cursor. Raises `CursorError` if a subscriber uses it."""


class Positions(Protocol):
    """Named positions that survive the process.

    A new name is on disk when `store` returns, because a durable subscription relies on it. If the newest values of
    known names are lost, work is repeated, but no event is lost.
    """

    def load(self) -> dict[str, int]:
        """Return all positions by name. Raises `LogDamaged` if one is damaged."""

    def repair(self) -> Sequence[str]:
        """Remove the damaged positions. Returns their names."""

    def store(self, changed: Mapping[str, int]) -> None:
        """Store the given positions; others stay as they are."""

    def remove(self, names: Collection[str]) -> None:
        """Remove positions. Names that do not exist have no effect."""


class Schema(NamedTuple):
    """One version of the schema for the payloads of some keys."""

    expression: str
    version: int  # from 1, for each expression
    mode: str  # "strict", "permissive", or "removed": this version removed the schema
    hash: str  # of the canonical JSON Schema: the same on every node
    schema: dict[str, Any]  # the JSON Schema
    registered_at_ns: int


class SchemaStore(Protocol):
    """Durable storage for every version of every schema. Both methods may block."""

    def load(self) -> Sequence[Schema]:
        """Return all versions, by expression and version."""

    def store(self, schema: Schema) -> None:
        """Store one more version. Returns once it is on disk. Raises a `LogError` if it is not stored."""


class Backup(NamedTuple):
    """A backup of a log: what it contains now, and what the last call added."""

    path: str
    cut: int  # the last offset that it contains
    added: int  # events
    log_id: int
    incarnation: int
    digest: bytes  # of the events up to the cut; empty if it is unknown
    made_at_ns: int
    is_full: bool = True  # False: only newer events were added to an earlier backup


class Purged(NamedTuple):
    """Result of a purge."""

    removed: int  # events
    until: int  # the head when it began: later events of these keys are not removed
    unacknowledged: tuple[str, ...] = ()  # the durable subscriptions that had not acknowledged all of them
    offloaded_until: int = 0  # events up to this offset are in the cold tier, from which nothing was removed


class Log(Protocol):
    """An append-only, ordered log of events.

    `append` and `accept_proxied_writes` never block. Methods that may block must not be called on the event loop.
    """

    path: str  # a path or URL, for messages
    read_only: bool

    @property
    def promise(self) -> Promise:
        """The guarantees of this log."""

    @property
    def cursors(self) -> Cursors:
        """The cursors of durable subscriptions, stored with this log."""

    @property
    def positions(self) -> Positions:
        """This node's positions in the logs of other nodes, stored with this log."""

    @property
    def schemas(self) -> SchemaStore:
        """The schemas registered for the payloads of this log."""

    @property
    def log_id(self) -> int:
        """The identity of this history: an odd number of at most 62 bits. It changes after a loss."""

    @property
    def writer_id(self) -> int:
        """The identity of this node as a writer of the history; the same as `log_id` if the log has one writer."""

    @property
    def lineage(self) -> Lineage:
        """The incarnations of this log. An owner begins one when it opens the log; a reader sees those of the owner."""

    def begin_incarnation(self) -> Incarnation:
        """Begin another incarnation now, because a copy of this log uses the current one. Returns once it is on disk.

        May block. Events that were appended before keep their offsets, which are below its `first`.
        """

    def digest(self, offset: int) -> bytes:
        """Return a digest of the events up to `offset`; empty if it is unknown. May block.

        Two logs with the same digest at an offset have the same events up to it, removed ones included.
        """

    @property
    def append(self) -> Callable[[Sequence[Row], Appended, Any], None]:
        """`append(rows, done, about)`: queue rows for the next commit, without blocking.

        `done` is called from the log's thread with `about` and the outcome.
        """

    def tail(self, committed: Callable[[Committed], None]) -> int:
        """Call `committed`, from the log's thread, with every event after the returned offset. Does not block.

        Each event, including those of other writers, is passed once, in the order of offsets, and before the append
        that stored it is reported as done; or together with it, in `AppendResult.committed`, if the append has the same
        callback. This is the only source of delivery.
        """

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        """Return the next events of a span, at most `limit`. A short or empty page does not mean the end of the log.

        A read may be stale and lack the newest events; `covered` then ends before them. Raises `LogTrimmed` if
        retention removed events after `span.after`. If that is 0, reading starts at the oldest event that is left.
        """

    def head(self) -> int:
        """Return the last committed offset that a read shows; 0 for an empty log. May be stale but never decreases."""

    def low_water(self) -> int:
        """Return the offset up to which retention removed every event."""

    def removed_until(self) -> int:
        """Return the highest offset that was removed from the middle of the log; 0 if none was."""

    def hold(self, reader: tuple[str, int] | None) -> None:
        """Let retention keep the events after an offset for a reader, such as another node, until the next call."""

    def size_bytes(self) -> int:
        """Return the size of the log on disk. May be called from any thread; does not wait for the log."""

    def before(self, offset: int) -> int:
        """Return the position to read after, so that the next event is the one at `offset`. Does not block."""

    def count(self, after: int, until: int) -> int:
        """Return how many events were stored after offset `after` up to and including `until`, removed ones too.

        Returns 0 if `until` is not after `after`. Does not block; returns the upper bound if the exact number would
        require reading.
        """

    def narrow(self, span: Span) -> Span:
        """Return the span with its times turned into offsets as far as possible, ending at the current head if open.

        No event after `span.after` up to the new `after` was published at or after `from_ns`, and the next event was.
        If no event was, the new `after` is the last offset. A start by time depends on this, so it is never stale.
        """

    def watch(self, moved: Callable[[int], None]) -> None:
        """Call `moved` with the head whenever another process appended. For read-only logs."""

    def accept_proxied_writes(self, write: ProxiedWrite) -> None:
        """Accept proxied writes from other processes from now on and pass the rows to `write`. Returns immediately.

        `write` is called on a thread of the log and must not block. Rows that are no longer wanted just before they
        would be stored are dropped. If the log is closed before a write is done, the process that waits for it writes
        the rows again.
        """

    def purge(self, keys: KeySet, progress: Callable[[int], None] | None = None) -> Purged:
        """Remove all events of some keys up to the current head, whatever their age. May block for long.

        Their offsets are not used again, and `digest` and `head` do not change. Reads leave them out, and pages that
        cover them are complete. Durable subscriptions do not prevent it. Commits continue in between. `progress` is
        called with the number of events removed so far.
        """

    def backup(
        self,
        target: str,
        progress: Callable[[int, int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> Backup:
        """Back up the log, with its cursors, positions and schemas, while it is in use. May block for long.

        `progress` is called with the events that were copied and their total, `check` between short steps. If `check`
        raises, or the log is closed, an earlier backup in `target` stays as it is. Raises `LogError` if the log has no
        backups.
        """

    @property
    def is_fork(self) -> bool:
        """Whether the log is a copy for rehearsals, which must not be used with a transport. Does not block."""

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of this log, for log records and the command line."""

    def close(self, timeout_s: float) -> None:
        """Store what was appended and release the log, within `timeout_s` seconds."""
