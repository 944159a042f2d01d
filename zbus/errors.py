"""The errors of zbus, in one tree. Each says what is true of the data now, and what to do next.

    ZbusError
    ├── ConfigInvalid           nothing was opened: fix the field
    ├── BusClosed               nothing was stored or sent: open a bus again
    ├── WrongLoop               nothing was stored or sent: call it on the event loop of the bus
    ├── EventInvalid            not stored: fix the call
    │   ├── KeyInvalid            the key or key expression is not legal
    │   ├── EventTooLarge         a size limit is exceeded
    │   └── PayloadInvalid        the payload does not match the type
    │       └── SchemaInvalid       the payload violates the schema that is registered for its key
    ├── SchemaError             not registered: the schema that was active stays active
    │   └── SchemaConflict        the new schema rejects what the active one accepts: change it, or force it
    ├── LogError                `outcome` says whether events are stored: bus.put(*error.events) tries them again
    │   ├── LogRequired           this bus has no log: open it with a path
    │   ├── LogReadOnly           not stored: another process owns the log
    │   ├── LogLocked             not opened: another process owns the log
    │   ├── LogFull               not stored: free space, then repeat the call
    │   ├── LogWriterFailed       the writer stopped: restart the process
    │   ├── IdentityConflict      not stored: another event has this identity; publish it with a new one
    │   ├── LogDamaged            acknowledged events are missing from the file: restore it
    │   ├── LogTrimmed            retention removed the events: start later
    │   └── EventCorrupt          one stored event fails its checksum: skip it on request
    ├── CursorError             the durable subscription is in use, unknown, or not possible here
    ├── TransportError          stored, but perhaps not sent to other nodes: it is sent again from the log
    │   └── TransportUnsupported  this transport cannot do this: choose another one
    ├── SessionTokenInvalid     no data was read: get a new token
    ├── RequestError            a request failed
    │   ├── NoResponders          no node serves the key
    │   ├── RequestTimeout        no reply in time: the request may or may not have been handled
    │   └── HandlerFailed         the remote handler raised an exception
    └── SubscriberLagged        this subscriber missed events: replay after `after`

Each error pickles, with its fields.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from copy import copy
from typing import Any, Literal, Protocol, TypeVar


class EventLike(Protocol):
    """An event, as errors and decoding see it."""

    @property
    def key(self) -> str: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102
    @property
    def payload(self) -> bytes: ...  # noqa: D102
    @property
    def content_type(self) -> str | None: ...  # noqa: D102


class ZbusError(Exception):
    """Base class of every error that zbus raises on purpose."""


E = TypeVar("E", bound=ZbusError)


def renewed(error: E) -> E:
    """Return a new exception with the same fields, for one of several callers that fail for the same reason.

    Raising an exception adds to its traceback, which keeps the caller's frames, and callers add notes.
    """
    again = copy(error)
    again.__dict__.pop("__notes__", None)
    again.__cause__ = error.__cause__
    return again


class ConfigInvalid(ZbusError):
    """Raised when a setting or an argument is invalid, or contradicts another one. Nothing was opened or changed."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class BusClosed(ZbusError):
    """Raised when a closed bus is used, or one that was never opened. This call stored and sent nothing."""

    def __init__(self, doing: str, reason: str = "") -> None:
        super().__init__(doing, reason)
        self.doing, self.reason = doing, reason

    def __str__(self) -> str:
        if self.reason:
            return f"cannot {self.doing}: {self.reason}; this call stored and sent nothing"
        return f"cannot {self.doing}: the bus is not open; this call stored and sent nothing. Open a bus and retry"


class WrongLoop(ZbusError):
    """Raised when a bus is used on another event loop or thread than its own. This call stored and sent nothing."""

    def __init__(self, doing: str) -> None:
        super().__init__(doing)
        self.doing = doing

    def __str__(self) -> str:
        return (
            f"cannot {self.doing} here: the bus belongs to the event loop that opened it, and this is another loop or "
            "thread; this call stored and sent nothing. Use asyncio.run_coroutine_threadsafe(…, loop), or zbus.blocking"
        )


class EventInvalid(ZbusError):
    """Base class for events that are rejected before anything is stored or sent."""


class KeyInvalid(EventInvalid):
    """Raised for a key or key expression that one of the transports could not carry: all of them reject it."""

    def __init__(self, key: object, reason: str, noun: str = "key") -> None:
        super().__init__(key, reason, noun)
        self.key, self.reason, self.noun = key, reason, noun

    def __str__(self) -> str:
        shown = repr(self.key)
        return f"{self.noun} {shown if len(shown) <= 120 else shown[:117] + '…'} rejected: {self.reason}"


class EventTooLarge(EventInvalid):
    """Raised when a payload or its headers exceed the size limit. Nothing was stored."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(what, size_bytes, limit_bytes)
        self.what, self.size_bytes, self.limit_bytes = what, size_bytes, limit_bytes

    def __str__(self) -> str:
        return f"{self.what} of {self.size_bytes:,} bytes exceeds the limit of {self.limit_bytes:,}; not stored"


class PayloadInvalid(EventInvalid):
    """Raised when a payload cannot be encoded, or does not decode to the expected type."""

    def __init__(self, reason: str, event: EventLike | None = None) -> None:
        super().__init__(reason, event)
        self.reason, self.event = reason, event

    def __str__(self) -> str:
        if self.event is None:
            return f"{self.reason}; not stored"
        if not self.event.offset:
            return f"event on {self.event.key!r}: {self.reason}; it is not stored on this node"
        return f"event at offset {self.event.offset} on {self.event.key!r}: {self.reason}; the log still has it"


class SchemaInvalid(PayloadInvalid):
    """Raised when a payload violates the schema that is registered for its key.

    Without `event`, the payload was rejected on publish and not stored. With `event`, it was stored or received anyway
    (from another node, or before the schema was registered); it is skipped here, and reading continues after it.
    """

    def __init__(
        self, key: str, expression: str, reason: str, payload: bytes, expected_hash: str, event: EventLike | None = None
    ) -> None:
        super().__init__(reason, event)
        self.args = (key, expression, reason, payload, expected_hash, event)
        self.key, self.expression, self.payload, self.expected_hash = key, expression, payload, expected_hash

    @property
    def topic(self) -> str:
        """The last segment of the key whose payload was rejected, like `Event.topic`."""
        return self.key.rpartition("/")[2]

    def __str__(self) -> str:
        shown = repr(self.payload[:120]) + ("…" if len(self.payload) > 120 else "")
        wrong = f"the payload violates schema {self.expected_hash} of {self.expression!r}: {self.reason}"
        if self.event is None:
            return f"{self.key!r}: {wrong}; payload: {shown}; not stored"
        if not self.event.offset:
            return f"event on {self.key!r}: {wrong}; payload: {shown}; it was received and is skipped"
        return f"event at offset {self.event.offset} on {self.key!r}: {wrong}; payload: {shown}; the log still has it"


class SchemaError(ZbusError):
    """Raised when a schema is not registered or removed. The active schema stays active, and no event changed."""

    def __init__(self, expression: str, reason: str) -> None:
        super().__init__(expression, reason)
        self.expression, self.reason = expression, reason

    def __str__(self) -> str:
        return f"schema for {self.expression!r}: {self.reason}; nothing was changed"


class SchemaConflict(SchemaError):
    """Raised when a new schema rejects what the active one accepts. It was not registered; see `reasons`."""

    def __init__(self, expression: str, version: int, expected_hash: str, reasons: Sequence[str]) -> None:
        super().__init__(expression, "; ".join(reasons))
        self.args = (expression, version, expected_hash, tuple(reasons))
        self.version, self.expected_hash, self.reasons = version, expected_hash, tuple(reasons)

    def __str__(self) -> str:
        return (
            f"schema for {self.expression!r}: it rejects what version {self.version} ({self.expected_hash}) accepts: "
            f"{self.reason}; version {self.version} stays active. Change the schema, or register it with force=True"
        )


class LogError(ZbusError):
    """Base class for errors of the log.

    If events could not be stored, `outcome` is "refused" (none of `events` is stored) or "unknown" (they may be). In
    other errors it is None. `events` has the events of the call that are not known to be stored, with their identity:
    `await bus.put(*error.events)` tries them again and stores none of them twice.
    """

    outcome: Literal["refused", "unknown"] | None = None
    events: tuple[Any, ...] = ()

    def __init__(self, *fields: object) -> None:
        super().__init__(*fields)

    def __str__(self) -> str:
        return f"{self.args[0]}{_OUTCOMES.get(self.outcome, '')}"


_OUTCOMES: dict[str | None, str] = {
    "refused": "; the events were not stored",
    "unknown": "; the outcome is unknown: put the same events again, with bus.put(*error.events)",
}


class LogRequired(LogError):
    """Raised when a call needs a log and this bus has no log."""

    def __init__(self, doing: str) -> None:
        super().__init__(doing)
        self.doing = doing

    def __str__(self) -> str:
        return f"{self.doing} needs a log, and this bus has no log: open it with zbus.open('app.db')"


class LogReadOnly(LogError):
    """Raised when a read-only bus publishes. Another process owns the log; nothing was stored."""

    outcome = "refused"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return (
            f"{self.path} is open read-only here; not stored. Publish in the process that owns the log, or open it "
            "without read_only=True"
        )


class LogLocked(LogError):
    """Raised when another process owns the log, or another bus of this process (`here`). Nothing was changed."""

    def __init__(self, path: str, pid: int, here: bool = False) -> None:
        super().__init__(path, pid, here)
        self.path, self.pid, self.here = path, pid, here

    def __str__(self) -> str:
        if self.here:
            return (
                f"{self.path}: this process has it open already, and a log has one owner at a time: use that bus, or "
                "open it here with read_only=True"
            )
        return (
            f"{self.path} is owned by process {self.pid}, and a log has one owner at a time: "
            "publish there, or open it here with read_only=True"
        )


class LogFull(LogError):
    """Raised when the disk is full. The call stored nothing; events stored before are safe and readable."""

    outcome = "refused"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"no space left for {self.path}: this call stored nothing. Free space and repeat it; reading continues"


class LogWriterFailed(LogError):
    """Raised after a write or fsync failed: the writer has stopped, because the disk may lose what it confirms."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(path, cause)
        self.path, self.cause = path, cause

    def __str__(self) -> str:
        now = "this event was not stored" if self.outcome == "refused" else "the outcome of this event is unknown"
        return (
            f"the writer of {self.path} stopped ({self.cause}). Events acknowledged before are safe; {now}. "
            "Check the disk, restart the process, then put the same events again"
        )


class IdentityConflict(LogError):
    """Raised when another event, with another key or payload, is stored under the identity of a new one.

    The stored event is unchanged, and `events` are not stored. Putting them again raises the same error.
    """

    outcome = "refused"

    def __init__(self, publisher_id: int, sequence: int, key: str, offset: int) -> None:
        super().__init__(publisher_id, sequence, key, offset)
        self.publisher_id, self.sequence, self.key, self.offset = publisher_id, sequence, key, offset

    def __str__(self) -> str:
        return (
            f"the identity ({self.publisher_id}, {self.sequence}) belongs to another event, on {self.key!r} at offset "
            f"{self.offset}, which is unchanged; the new event was not stored. Give it an identity of its own: publish "
            "it with a publisher, or put it with another publisher_id or sequence"
        )


class LogDamaged(LogError):
    """Raised when acknowledged events are missing: the log was truncated, replaced or damaged. Nothing was changed."""

    def __init__(self, path: str, reason: str, missing: tuple[int, int] | None = None, advice: str = "") -> None:
        super().__init__(path, reason, missing, advice)
        self.path, self.reason, self.missing, self.advice = path, reason, missing, advice

    def __str__(self) -> str:
        gone = f"; missing: offsets {self.missing[0]} to {self.missing[1]}" if self.missing else ""
        advice = self.advice or (
            "Restore the file, or continue without the missing events with: "
            f"zbus log verify {shlex.quote(self.path)} --accept-loss"
        )
        return f"{self.path}: {self.reason}{gone}. Nothing was changed. {advice}"


class LogTrimmed(LogError):
    """Raised when retention has removed requested events. A subscription continues after `low_water`.

    `missed` is the number of events that were removed, whatever their keys.
    """

    def __init__(self, after: int, low_water: int, missed: int | None = None) -> None:
        missed = low_water - after if missed is None else missed
        super().__init__(after, low_water, missed)
        self.after, self.low_water, self.missed = after, low_water, missed

    def __str__(self) -> str:
        return (
            f"the {self.missed} events after offset {self.after} up to {self.low_water} were removed by retention; "
            f"the log begins after offset {self.low_water}"
        )


class EventCorrupt(LogError):
    """Raised when a stored event fails its checksum. Other events are not affected."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset, self.reason = offset, reason

    def __str__(self) -> str:
        return f"event at offset {self.offset} is corrupt ({self.reason}); skip it with skip_corrupt=True"


class CursorError(ZbusError):
    """Raised when a durable subscription cannot be used. No position was changed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"durable {self.name!r}: {self.reason}" if self.name else self.reason


class TransportError(ZbusError):
    """Raised when other nodes cannot be reached. With a log, events are kept and sent later."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class TransportUnsupported(TransportError):
    """Raised when a transport lacks a capability. Nothing was sent or changed."""

    def __init__(self, transport: str, capability: str) -> None:
        super().__init__(f"the transport {transport} does not support {capability}")
        self.args = (transport, capability)
        self.transport, self.capability = transport, capability


class SessionTokenInvalid(ZbusError):
    """Raised when a session token is malformed, tampered with, expired, or signed with another secret.

    No data was read. The message does not contain the token.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the session token is rejected: {self.reason}; no data was read. Get a new one with session.token()"


class RequestError(ZbusError):
    """Base class for errors of `bus.request`."""


class NoResponders(RequestError):
    """Raised when no node serves the key, or when the serving node disconnected before it replied."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"no responders for {self.key!r}. Start a node that serves it, then send the request again"


class RequestTimeout(RequestError):
    """Raised when no reply arrives in time. The request may or may not have been handled."""

    def __init__(self, key: str, timeout_s: float) -> None:
        super().__init__(key, timeout_s)
        self.key, self.timeout_s = key, timeout_s

    def __str__(self) -> str:
        return f"no reply for {self.key!r} within {self.timeout_s:g} s; the request may or may not have been handled"


class HandlerFailed(RequestError):
    """Raised when the remote handler raised. `kind` is the name of its exception, `reason` its text."""

    def __init__(self, key: str, kind: str, reason: str) -> None:
        super().__init__(key, kind, reason)
        self.key, self.kind, self.reason = key, kind, reason

    def __str__(self) -> str:
        return f"the handler of {self.key!r} raised {self.kind}: {self.reason}"


class SubscriberLagged(ZbusError):
    """Raised when the queue of a subscriber overflowed. Reading continues with the next event after the gap.

    With a log, nothing is lost: `bus.replay(*sub.key_exprs, after=error.after, until=error.until)` yields the missed
    events. If the log of this node does not have them (`until` is 0), they are lost, and counted.
    """

    def __init__(self, keys: Sequence[str], missed: int, after: int, until: int, queue_events: int) -> None:
        super().__init__(tuple(keys), missed, after, until, queue_events)
        self.keys, self.missed = tuple(keys), missed
        self.after, self.until, self.queue_events = after, until, queue_events

    def __str__(self) -> str:
        start = f"subscriber on {', '.join(self.keys)} fell behind its queue of {self.queue_events} events and missed "
        if self.until:
            return f"{start}{self.missed}; replay after offset {self.after} until {self.until}"
        return f"{start}{self.missed}; this node has no log to replay them from"
