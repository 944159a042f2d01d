"""The latest log records of level WARNING and above: gaps, drops and errors. Bounded, newest last."""

from __future__ import annotations

import logging
import re
from collections import deque
from datetime import UTC, datetime
from itertools import count, islice
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, finalize

import msgspec

from zbus.observe.formatters import as_json
from zbus.observe.records import listen
from zbus_web.access.permissions import SESSIONS

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDS_MAX = 500
RECORD_BYTES_MAX = 16 * 1024
_SESSION = re.compile(rf'\b{SESSIONS}(?:[^/\s"\\]|\\.)+')


class ProblemRecords:
    """Receives every zbus log record of level WARNING and above in this process, on any thread, until it is closed.

    Each log record has an increasing `id`, so that a client can request only newer ones. Session ids are removed.
    """

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self._kept: deque[dict[str, Any]] = deque(maxlen=records_max)
        self._numbers = count(1)
        receive = WeakMethod(self._receive)  # An instance that is never closed can still be collected.
        self.close: Callable[[], None] = listen(logging.WARNING, lambda *args: (call := receive()) and call(*args))
        finalize(self, self.close)

    @property
    def last(self) -> int:
        """The highest id so far."""
        kept = self._kept.copy()
        return kept[-1]["id"] if kept else 0

    def after(self, number: int = 0) -> list[dict[str, Any]]:
        """Return the log records with an id above `number`, oldest first."""
        kept = self._kept.copy()  # One atomic step, because other threads append.
        newer = sum(1 for each in kept if each["id"] > number)
        return list(islice(kept, len(kept) - newer, None))

    def _receive(self, level: int, fields: dict[str, Any]) -> None:
        text = as_json(fields)
        if len(text) > RECORD_BYTES_MAX:
            text = as_json({"record": fields["record"], "left_out": f"{len(text)} bytes"})
        decoded = msgspec.json.decode(_SESSION.sub(f"{SESSIONS}…", text.decode()))
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._kept.append({"id": next(self._numbers), "at": now, "level": logging.getLevelName(level), **decoded})
