"""Every error of zbus, in one tree. Each says what is true of the data now, and what to do next.

    ZbusError
    ├── ConfigInvalid        nothing was opened: fix the field
    ├── BusClosed            nothing was stored or sent: open a bus again
    ├── EventInvalid         never stored: fix the call
    │   ├── KeyInvalid         the key or key expression is not legal
    │   ├── EventTooLarge      over a size limit
    │   └── PayloadInvalid     the payload does not fit the type asked for
    │       └── SchemaInvalid    the payload does not fit the schema that is registered for its key
    ├── SchemaError          not registered: what was in force before still is
    │   └── SchemaConflict     it would refuse what the one in force accepts: change it, or force it
    ├── LogError             outcome unknown: publish the same events again, identity and all
    │   ├── LogRequired         this bus keeps no log: open one with a path
    │   ├── LogReadOnly        not stored: another process owns the log
    │   ├── LogLocked           not opened: another process owns the log
    │   ├── LogFull            not stored: free space, then publish again
    │   ├── LogWriterFailed         the writer stopped for good: restart the process
    │   ├── LogDamaged         the file is not what was acknowledged: see what is missing
    │   ├── LogTrimmed         retention removed what was asked for: start later
    │   └── EventCorrupt       one stored event fails its checksum: skip it on request
    ├── CursorError          a durable name: in use, unknown, or not usable here
    ├── TransportError          stored, perhaps not sent to other nodes: it is sent again from the log
    │   └── TransportUnsupported        this transport cannot do what was asked: choose another, or do without
    ├── SessionTokenInvalid  nothing was read: have a new token signed
    ├── RequestError         a question to another node
    │   ├── NoResponders      nobody answers for the key now
    │   ├── RequestTimeout     no answer in time: it may or may not have been handled
    │   └── HandlerFailed      the handler at the far end raised: its error is told
    └── SubscriberLagged     not seen by this subscriber: replay after `after`

Each error pickles, with its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class EventLike(Protocol):
    """What an error, or decoding, needs to know of an event."""

    @property
    def key(self) -> str: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102
    @property
    def payload(self) -> bytes: ...  # noqa: D102
    @property
    def content_type(self) -> str | None: ...  # noqa: D102


class ZbusError(Exception):
    """The root of the tree: `except zbus.ZbusError` catches whatever zbus raises on purpose."""


class ConfigInvalid(ZbusError):
    """The configuration is wrong or contradicts itself. Nothing was opened."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class BusClosed(ZbusError):
    """The bus is closed, or was never opened. Nothing was stored or sent by this call."""

    def __init__(self, doing: str) -> None:
        super().__init__(doing)
        self.doing = doing

    def __str__(self) -> str:
        return f"cannot {self.doing}: the bus is not open. Nothing was stored or sent by this call"


class EventInvalid(ZbusError):
    """The event was refused before anything was stored or sent."""


class KeyInvalid(EventInvalid):
    """A key (or key expression) that some transport could not carry, so all of them refuse it."""

    def __init__(self, key: object, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        shown = repr(self.key)
        return f"key {shown if len(shown) <= 120 else shown[:117] + '…'} refused: {self.reason}"


class EventTooLarge(EventInvalid):
    """A payload or its headers are over the limit. Refused before it was copied."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(what, size_bytes, limit_bytes)
        self.what, self.size_bytes, self.limit_bytes = what, size_bytes, limit_bytes

    def __str__(self) -> str:
        return f"{self.what} of {self.size_bytes:,} bytes is over the limit of {self.limit_bytes:,}; not stored"


class PayloadInvalid(EventInvalid):
    """A payload cannot be encoded, or does not decode to the type asked for."""

    def __init__(self, reason: str, event: EventLike | None = None) -> None:
        super().__init__(reason, event)
        self.reason, self.event = reason, event

    def __str__(self) -> str:
        if self.event is None:
            return f"{self.reason}; not stored"
        return f"event at offset {self.event.offset} on {self.event.key!r}: {self.reason}; the log still has it"


class SchemaInvalid(PayloadInvalid):
    """A payload does not fit the schema that is registered for its key.

    Without `event` it was refused at publish, and not stored. With `event` it was received or stored all the same
    (by another node, or before the schema was registered): it is passed over here, and reading goes on after it.
    """

    def __init__(
        self, key: str, expression: str, reason: str, payload: bytes, expected_hash: str, event: EventLike | None = None
    ) -> None:
        super().__init__(reason, event)
        self.args = (key, expression, reason, payload, expected_hash, event)
        self.key, self.expression, self.payload, self.expected_hash = key, expression, payload, expected_hash

    @property
    def topic(self) -> str:
        """The last segment of the key."""
        return self.key.rpartition("/")[2]

    def __str__(self) -> str:
        shown = repr(self.payload[:120]) + ("…" if len(self.payload) > 120 else "")
        wrong = f"the payload does not fit schema {self.expected_hash} of {self.expression!r}: {self.reason}"
        if self.event is None:
            return f"{self.key!r}: {wrong}; payload: {shown}; not stored"
        if not self.event.offset:
            return f"event on {self.key!r}: {wrong}; payload: {shown}; it was received, and is not handed over"
        return f"event at offset {self.event.offset} on {self.key!r}: {wrong}; payload: {shown}; the log still has it"


class SchemaError(ZbusError):
    """A schema was not registered or removed. What was in force before still is, and no event was touched."""

    def __init__(self, expression: str, reason: str) -> None:
        super().__init__(expression, reason)
        self.expression, self.reason = expression, reason

    def __str__(self) -> str:
        return f"schema for {self.expression!r}: {self.reason}; nothing was changed"


class SchemaConflict(SchemaError):
    """A schema would refuse what the one in force accepts. It was not registered; `reasons` say what and where."""

    def __init__(self, expression: str, version: int, expected_hash: str, reasons: Sequence[str]) -> None:
        super().__init__(expression, "; ".join(reasons))
        self.args = (expression, version, expected_hash, tuple(reasons))
        self.version, self.expected_hash, self.reasons = version, expected_hash, tuple(reasons)

    def __str__(self) -> str:
        return (
            f"schema for {self.expression!r}: it refuses what version {self.version} ({self.expected_hash}) accepts: "
            f"{self.reason}; version {self.version} stays in force. Change it, or register it with force=True"
        )


class LogError(ZbusError):
    """The outcome of a commit is unknown. `bus.put` the same events again: none is stored twice."""

    def __init__(self, *fields: object) -> None:
        super().__init__(*fields)

    def __str__(self) -> str:
        return str(self.args[0])


class LogRequired(LogError):
    """The call needs a log, and this bus keeps none."""

    def __init__(self, doing: str) -> None:
        super().__init__(doing)
        self.doing = doing

    def __str__(self) -> str:
        return f"{self.doing} needs a log, and this bus keeps none: open it with zbus.open('app.db')"


class LogReadOnly(LogError):
    """This bus reads a log that another process owns. Nothing was stored."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} is open read-only here; not stored: publish in the process that owns the log"


class LogLocked(LogError):
    """Another process owns the log. Nothing was opened or changed."""

    def __init__(self, path: str, pid: int) -> None:
        super().__init__(path, pid)
        self.path, self.pid = path, pid

    def __str__(self) -> str:
        return (
            f"{self.path} is owned by process {self.pid}, and a log has one owner at a time: "
            "publish there, or open it here with read_only=True"
        )


class LogFull(LogError):
    """No space left. The events were not stored; those stored before are safe and readable."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"no space left for {self.path}; not stored. Free space and publish again; readers go on"


class LogWriterFailed(LogError):
    """The writer stopped for good, because the disk no longer keeps its word."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(path, cause)
        self.path, self.cause = path, cause

    def __str__(self) -> str:
        return (
            f"the writer of {self.path} stopped for good ({self.cause}). What was acknowledged before is safe; the "
            "outcome of this event is unknown. Restart the process, check the disk, then put the same events again"
        )


class LogDamaged(LogError):
    """The log is not the one that was acknowledged: truncated, replaced, or damaged."""

    def __init__(self, path: str, reason: str, missing: tuple[int, int] | None = None) -> None:
        super().__init__(path, reason, missing)
        self.path, self.reason, self.missing = path, reason, missing

    def __str__(self) -> str:
        gone = f"; missing: offsets {self.missing[0]} to {self.missing[1]}" if self.missing else ""
        return (
            f"{self.path}: {self.reason}{gone}. Nothing was changed. Restore the file, or go on without what is "
            f"missing with: zbus log verify {self.path} --accept-loss"
        )


class LogTrimmed(LogError):
    """Retention removed events that were asked for."""

    def __init__(self, after: int, low_water: int) -> None:
        super().__init__(after, low_water)
        self.after, self.low_water = after, low_water

    def __str__(self) -> str:
        return (
            f"the events after offset {self.after} up to {self.low_water} were removed by retention; "
            f"what is left starts after offset {self.low_water}"
        )


class EventCorrupt(LogError):
    """One stored event fails its checksum. The events around it are not affected."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset, self.reason = offset, reason

    def __str__(self) -> str:
        return f"event at offset {self.offset} is corrupt ({self.reason}); go past it with skip_corrupt=True"


class CursorError(ZbusError):
    """A durable name cannot be used. No position was changed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"durable {self.name!r}: {self.reason}" if self.name else self.reason


class TransportError(ZbusError):
    """Other nodes cannot be reached. With a log the events are kept and sent again."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class TransportUnsupported(TransportError):
    """The transport cannot do this. Nothing was sent, and nothing else changed."""

    def __init__(self, transport: str, capability: str) -> None:
        super().__init__(f"the transport {transport} cannot do this: {capability}")
        self.args = (transport, capability)
        self.transport, self.capability = transport, capability


class SessionTokenInvalid(ZbusError):
    """A token does not open a session: it is none, was changed, has expired, or is of another secret. Nothing was read.

    The token itself is not told.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the session token is refused: {self.reason}. Nothing was read; have a new one signed: session.token()"


class RequestError(ZbusError):
    """A question to another node was not answered as it should."""


class NoResponders(RequestError):
    """Nobody answers for the key now, or the one who did went away at that very moment, before it answered."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"nobody answers for {self.key!r} now. Start what serves it, and ask again"


class RequestTimeout(RequestError):
    """No answer came in time. It is not known whether the question was handled."""

    def __init__(self, key: str, timeout_s: float) -> None:
        super().__init__(key, timeout_s)
        self.key, self.timeout_s = key, timeout_s

    def __str__(self) -> str:
        return f"no answer for {self.key!r} within {self.timeout_s:g} s; it may or may not have been handled"


class HandlerFailed(RequestError):
    """The handler at the far end raised. `kind` is the name of its error's type."""

    def __init__(self, key: str, kind: str, reason: str) -> None:
        super().__init__(key, kind, reason)
        self.key, self.kind, self.reason = key, kind, reason

    def __str__(self) -> str:
        return f"the handler of {self.key!r} raised {self.kind}: {self.reason}"


class SubscriberLagged(ZbusError):
    """A subscriber's queue overflowed. Reading goes on with the next event after the gap.

    With a log nothing is lost: `bus.replay(*sub.key_exprs, after=error.after, until=error.until)`
    yields what was missed. If this node's log does not have the events (`until` is 0), they are gone, and counted.
    """

    def __init__(self, keys: Sequence[str], missed: int, after: int, until: int, queue_events: int) -> None:
        super().__init__(tuple(keys), missed, after, until, queue_events)
        self.keys, self.missed = tuple(keys), missed
        self.after, self.until, self.queue_events = after, until, queue_events

    def __str__(self) -> str:
        start = f"subscriber on {', '.join(self.keys)} fell behind its queue of {self.queue_events} events and missed "
        if self.until:
            return f"{start}{self.missed}; replay after offset {self.after} until {self.until}"
        return f"{start}{self.missed}; there is no log to replay them from"
