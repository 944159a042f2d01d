"""Structured log records: one vocabulary, written through `logging` and, on request, published on the bus.

A record is one line of the logger `zbus`, `NAME field=value …`, and has the same fields as `record.zbus` for handlers
that need them. Records about events are written once per burst, not per event, and are made only if a handler or a
listener receives them: EVENT_PUBLISHED, EVENT_RECEIVED and replays at level DEBUG, the start and end of buses and nodes
at INFO, and problems at WARNING or above. Every record has a `correlation_id`: that of the event that it is about, or
else the run id of the node that writes it. A record that has a `reason`, a sentence for people, also has a `code`, a
stable name for programs. `catalog` describes every record and every code.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from zbus.util.run_id import run_id

logger = logging.getLogger("zbus")
RECORDS = "@zbus/record/"  # followed by the name: the key on which a record is published

BUS_STARTED = "BUS_STARTED"
BUS_STOPPED = "BUS_STOPPED"
NODE_JOINED = "NODE_JOINED"
NODE_LEFT = "NODE_LEFT"
NODE_REJOINED = "NODE_REJOINED"
NODE_REFUSED = "NODE_REFUSED"
ORIGIN_CLONED = "ORIGIN_CLONED"
ORIGIN_REWOUND = "ORIGIN_REWOUND"
ORIGIN_UNCONFIRMED = "ORIGIN_UNCONFIRMED"
EVENT_PUBLISHED = "EVENT_PUBLISHED"
EVENT_RECEIVED = "EVENT_RECEIVED"
EVENT_DROPPED = "EVENT_DROPPED"
EVENT_RETRY = "EVENT_RETRY"
EVENT_RETRY_LIMIT_EXCEEDED = "EVENT_RETRY_LIMIT_EXCEEDED"
EVENT_GAP = "EVENT_GAP"
EVENT_INVALID = "EVENT_INVALID"
EVENT_INVALID_SCHEMA = "EVENT_INVALID_SCHEMA"
EVENT_BACKPRESSURE = "EVENT_BACKPRESSURE"
EVENT_SUBSCRIBER_SLOW = "EVENT_SUBSCRIBER_SLOW"
EVENT_REPLAY_REQUESTED = "EVENT_REPLAY_REQUESTED"
EVENT_REPLAY_DELIVERED = "EVENT_REPLAY_DELIVERED"
EVENT_REPLAY_FAILED = "EVENT_REPLAY_FAILED"
TRANSPORT_CONNECTED = "TRANSPORT_CONNECTED"
TRANSPORT_CONNECT_FAILED = "TRANSPORT_CONNECT_FAILED"
TRANSPORT_DISCONNECTED = "TRANSPORT_DISCONNECTED"
TRANSPORT_RECONNECTED = "TRANSPORT_RECONNECTED"
TRANSPORT_PERMISSION_DENIED = "TRANSPORT_PERMISSION_DENIED"
TRANSPORT_DISCOVERY_FAILED = "TRANSPORT_DISCOVERY_FAILED"
TRANSPORT_INPUT_REJECTED = "TRANSPORT_INPUT_REJECTED"
TRANSPORT_ERROR = "TRANSPORT_ERROR"

# Called on any thread with the level and the fields of a record. It must only append to a queue and wake its reader.
Listener = Callable[[int, dict[str, Any]], None]

_correlation: ContextVar[str | None] = ContextVar("zbus_correlation", default=None)
_Listeners = tuple[tuple[int, Listener], ...]
_listeners: _Listeners = ()  # each with its minimum level; the tuple is replaced, never changed
SILENT = 1 << 30
listened_from = SILENT  # the lowest level of any listener; the path of every event reads it
_changing = threading.RLock()


def record(name: str, level: int = logging.INFO, exc_info: BaseException | None = None, /, **fields: Any) -> None:
    """Write one record if a handler or a listener receives this level. For a record with a reason, use
    `record_reason`.

    Never raises, whatever a handler does: the caller may be on the path of events. A handler's exception is printed to
    stderr, as `logging.Handler.handleError` does. Code that the tasks of users call, on behalf of a node, writes
    records in a `with runtime.running()` block.
    """
    logged = logger.isEnabledFor(level)
    listeners = [listener for least, listener in _listeners if level >= least] if _listeners else ()
    if not logged and not listeners:
        return
    fields.setdefault("correlation_id", current_id())
    found = {"record": name, **fields}
    if logged:  # made by hand: finding the caller's line takes as long as everything else, and it is always in zbus
        about = None if exc_info is None else (type(exc_info), exc_info, exc_info.__traceback__)
        line = logger.makeRecord(logger.name, level, "zbus", 0, _Text(found), (), about, extra={"zbus": found})
        _safely(logger.handle, line)
    if exc_info is not None:
        found = found | {"error": _text_of(exc_info)}
    for listener in listeners:
        _safely(listener, level, found)


def record_reason(
    name: str, level: int, exc_info: BaseException | None = None, /, *, code: str, reason: str, **fields: Any
) -> None:
    """Write one record that says why: `code` is a stable name from `catalog.CODES` for programs, `reason` is a
    sentence for people.
    """
    record(name, level, exc_info, code=code, reason=reason, **fields)


def current_id() -> str:
    """Return the correlation id of this task or thread: that of the event that it handles, or else its run id."""
    return _correlation.get() or run_id.get()


def _safely(call: Callable[..., object], *args: Any) -> None:
    try:
        call(*args)
    except Exception:
        if logging.raiseExceptions and sys.stderr is not None:  # the same condition as in `logging`
            with suppress(OSError, ValueError):  # stderr is closed
                traceback.print_exc()


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class _Text:
    """The text of a record, made when a handler formats it."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        name, *fields = self._fields.items()
        return f"{name[1]} {' '.join(f'{field}={value!r}' for field, value in fields)}"


def wanted(level: int) -> bool:
    """Return whether a record of this level would be written. Called once per burst, before a record is made."""
    return level >= listened_from or logger.isEnabledFor(level)


def listen(level: int, listener: Listener) -> Callable[[], None]:
    """Pass every record of `level` and above to `listener`, on any thread. Returns a function that removes it."""
    entry = (level, listener)
    _change(lambda now: (*now, entry))
    return lambda: _change(lambda now: tuple([each for each in now if each is not entry]))


def _change(change: Callable[[_Listeners], _Listeners]) -> None:
    """Replace the listeners. A finalizer that garbage collection runs on this thread meanwhile may replace them too."""
    global _listeners, listened_from
    with _changing:
        while True:
            before = _listeners
            after = change(before)
            if _listeners is before:
                _listeners = after
                listened_from = min((least for least, _ in after), default=SILENT)
                return


@contextmanager
def correlated(correlation_id: str) -> Iterator[None]:
    """Give records that this task or thread writes in the `with` block this `correlation_id`.

    >>> with correlated("order-7"):
    ...     record(EVENT_RETRY, key="shop/orders/created")
    """
    before = _correlation.set(correlation_id)
    try:
        yield
    finally:
        _correlation.reset(before)
