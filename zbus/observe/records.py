"""Structured records of what the bus does: one vocabulary, through logging and, on request, on the bus itself.

A record is one line of the logger `zbus`, `NAME field=value …`, and carries the same as `record.zbus` for handlers
that want the fields. What happens to events is told once per burst, not per event, and only if somebody listens:
EVENT_PUBLISHED, EVENT_RECEIVED and the replays at level DEBUG, the lives of buses and nodes at INFO, whatever went
wrong at WARNING or above. Every record has a `correlation_id`: that of the event it is about, or else of this run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from zbus.util.runtime import REAL

logger = logging.getLogger("zbus")
RECORDS = "@zbus/record/"  # and the name: where a record is published on the bus

BUS_STARTED = "BUS_STARTED"
BUS_STOPPED = "BUS_STOPPED"
NODE_JOINED = "NODE_JOINED"
NODE_LEFT = "NODE_LEFT"
NODE_REJOINED = "NODE_REJOINED"
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

# Called on any thread with the level and the fields of a record: it only appends and wakes.
Listener = Callable[[int, dict[str, Any]], None]

RUN_ID = REAL.token_hex(8)  # of this process
_correlation: ContextVar[str] = ContextVar("zbus_correlation", default=RUN_ID)
_Listeners = tuple[tuple[int, Listener], ...]
_listeners: _Listeners = ()  # each with the least level that it wants; replaced, never changed
SILENT = 1 << 30
listened_from = SILENT  # the lowest level that any listener wants: read on the path of every event
_changing = threading.RLock()


def record(name: str, level: int = logging.INFO, exc_info: BaseException | None = None, **fields: Any) -> None:
    """Write one record, if anybody listens."""
    logged = logger.isEnabledFor(level)
    heard = [listener for least, listener in _listeners if level >= least] if _listeners else ()
    if not logged and not heard:
        return
    fields.setdefault("correlation_id", _correlation.get())
    found = {"record": name, **fields}
    if logged:  # by hand: looking for the line of the caller takes as long as all the rest, and it is always ours
        about = None if exc_info is None else (type(exc_info), exc_info, exc_info.__traceback__)
        line = logger.makeRecord(logger.name, level, "zbus", 0, _Text(found), (), about, extra={"zbus": found})
        logger.handle(line)
    if exc_info is not None:
        found = found | {"error": f"{type(exc_info).__name__}: {exc_info}"}
    for listener in heard:
        listener(level, found)


class _Text:
    """The text of a record, made if somebody writes it as text."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        name, *fields = self._fields.items()
        return f"{name[1]} {' '.join(f'{field}={value!r}' for field, value in fields)}"


def wanted(level: int) -> bool:
    """Return whether a record of this level would be written: asked once per burst, before one is made."""
    return level >= listened_from or logger.isEnabledFor(level)


def listen(level: int, listener: Listener) -> Callable[[], None]:
    """Let `listener` have every record of `level` and above, from any thread; returns what ends that."""
    entry = (level, listener)
    _change(lambda now: (*now, entry))
    return lambda: _change(lambda now: tuple([each for each in now if each is not entry]))


def _change(change: Callable[[_Listeners], _Listeners]) -> None:
    """Replace the listeners. What garbage collection finalizes may change them too, on this thread, meanwhile."""
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
    """Records that are written meanwhile, in this task or thread, belong to `correlation_id`.

    >>> with correlated("order-7"):
    ...     record(EVENT_RETRY, key="shop/orders/created")
    """
    before = _correlation.set(correlation_id)
    try:
        yield
    finally:
        _correlation.reset(before)
