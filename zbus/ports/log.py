"""The log port: what the core needs from a log. `zbus.plugins` finds the implementation by name.

A log keeps events in order and makes them durable. It knows nothing of transports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from zbus.errors import LogError, ZbusError
from zbus.event import Event
from zbus.keys import KeySet

# One event on its way into the log, encoded, without an offset yet:
# publisher_id, sequence, published_at, key, payload, headers. A plain tuple, because it is made for every event.
Row = tuple[int, int, int, str, bytes, bytes | None]

# Called once by the log's own thread: one offset per row, or the error that befell all of them.
Appended = Callable[[Sequence[int] | LogError], None]

# Called once, by any thread, with what became of rows that another process wants stored: they may be refused as well.
Answered = Callable[[Sequence[int] | ZbusError], None]


class Span(NamedTuple):
    """What to read: offsets over `after` up to `until`, and times from `from_ns` up to `to_ns`, both included."""

    after: int = 0
    until: int | None = None
    from_ns: int | None = None
    to_ns: int | None = None


class Page(Protocol):
    """A run of events as the log has them; decoding waits until somebody wants them."""

    covered: int  # every event asked for, up to this offset, is in this page or an earlier one
    low_water: int  # everything up to this offset was removed by retention

    def events(self, skip_corrupt: bool = False) -> tuple[list[Event], LogError | None, int]:
        """The events in order; the error that ends them early, if any; how many bad ones were skipped."""


class Cursor(NamedTuple):
    """The position of a durable name."""

    name: str
    offset: int
    keys: tuple[str, ...]
    updated_at_ns: int
    owner_pid: int | None


class Cursors(Protocol):
    """Durable positions by name. They survive the process, and one reader at a time uses each."""

    def claim(self, name: str, keys: Sequence[str], start: int) -> int:
        """Take `name` for this process and return its position, which is `start` where it is new."""

    def advance(self, name: str, offset: int, done: Callable[[LogError | None], None] | None = None) -> None:
        """Store a position, never backwards, without waiting; `done` is called when it is on disk, or failed."""

    def release(self, name: str) -> None:
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
    """An append-only, ordered record of events. `append` and `take_errands` never block; others: off the loop."""

    path: str
    read_only: bool

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
    def origin(self) -> int:
        """What tells this log from all others: odd, and 62 bits at most. After a loss it is another one."""

    def append(self, rows: Sequence[Row], done: Appended) -> None:
        """Take rows, at once; `done` is called from the log's thread when they are durable, or failed."""

    def read(self, keys: KeySet, span: Span, limit: int) -> Page:
        """The next events of a span, at most `limit`; fewer, or none, do not mean that there are no more."""

    def head(self) -> int:
        """The last committed offset; 0 for an empty log."""

    def low_water(self) -> int:
        """Everything up to this offset was removed by retention."""

    def narrow(self, span: Span) -> Span:
        """The same span with its times turned into offsets as far as they go, and an end: the head of now."""

    def watch(self, moved: Callable[[int], None]) -> None:
        """Tell `moved` of the head whenever another process appended (a log that is read here only)."""

    def take_errands(self, take: Callable[[Sequence[Row], Answered], None]) -> None:
        """From now on let other processes have rows stored here, through `take`; returns at once.

        `take` is called on a thread of the log: it only appends and wakes. Rows that are not answered when the log
        is closed are put again by those who wait for them.
        """

    def diagnostics(self) -> dict[str, Any]:
        """What this log is."""

    def close(self, timeout_s: float) -> None:
        """Store what was appended and let go of the file, in bounded time."""
