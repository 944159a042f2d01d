"""What is refused, and how it is told: one JSON form for every answer that is not a success.

    {"error": {"code": "key_invalid", "reason": "what and why", "now": "what is true of the data now, what to do"}}

Errors of zbus, of bad requests and of the router all become it here, and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response

from zbus import errors as zbus_errors
from zbus.errors import ZbusError

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode

NOTHING_STORED = "Nothing was stored. Fix the request and send it again"
NOTHING_CHANGED = "Nothing was changed. Fix the request and send it again"

# For each error of zbus the first that fits: status, code, and what is true of the data now.
_KNOWN: tuple[tuple[type[ZbusError], int, str, str], ...] = (
    (zbus_errors.KeyInvalid, 400, "key_invalid", NOTHING_STORED),
    (zbus_errors.EventTooLarge, 413, "event_too_large", "Nothing was stored. Send less, or raise payload_bytes_max"),
    (zbus_errors.SchemaInvalid, 422, "schema_invalid", NOTHING_STORED),
    (zbus_errors.PayloadInvalid, 422, "payload_invalid", NOTHING_STORED),
    (zbus_errors.EventInvalid, 400, "event_invalid", NOTHING_STORED),
    (zbus_errors.SchemaError, 409, "schema_refused", "Nothing was changed. The schema in force before still is"),
    (zbus_errors.LogReadOnly, 409, "log_read_only", "Nothing was stored. Publish in the process that owns the log"),
    (zbus_errors.LogRequired, 409, "log_missing", "This bus keeps no log. Start it with one"),
    (
        zbus_errors.LogFull,
        507,
        "log_full",
        "Not stored; what was stored before is safe. Free space, then send it again",
    ),
    (zbus_errors.LogWriterFailed, 503, "log_stopped", "The outcome is unknown. Restart the server, then send it again"),
    (zbus_errors.LogTrimmed, 410, "log_trimmed", "What is left can be read. Start after `low_water`"),
    (zbus_errors.EventCorrupt, 500, "event_corrupt", "The events around it can be read. Go on after its offset"),
    (zbus_errors.LogError, 503, "outcome_unknown", "It may or may not be stored. Repeat it with its Idempotency-Key"),
    (zbus_errors.CursorError, 409, "cursor_refused", "No position was changed"),
    (zbus_errors.SessionTokenInvalid, 401, "token_refused", "Nothing was read or changed. Ask for another token"),
    (zbus_errors.ConfigInvalid, 400, "value_invalid", NOTHING_CHANGED),
    (zbus_errors.BusClosed, 503, "bus_closed", "Nothing was stored by this request. The server is stopping"),
    (zbus_errors.TransportError, 502, "transport_failed", "What was stored is safe, and is sent again"),
    (ZbusError, 500, "failed", "What was acknowledged before is safe"),
)
_BY_STATUS = {
    404: ("not_found", "Nothing was changed. `zbus serve --help` and docs/web.md say what there is"),
    405: ("method_not_allowed", NOTHING_CHANGED),
}


class HttpError(Exception):
    """An answer that is not a success: an HTTP status, a code for programs, and words for people.

    >>> HttpError(400, "from_invalid", "x is no time", "Nothing was changed").body()
    b'{"error":{"code":"from_invalid","reason":"x is no time","now":"Nothing was changed"}}'
    """

    def __init__(
        self, status: int, code: str, reason: str, now: str = NOTHING_CHANGED, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, code, reason, now)
        self.status, self.code, self.reason, self.now = status, code, reason, now
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON that is sent."""
        return _encode({"error": {"code": self.code, "reason": self.reason, "now": self.now}})


def refusal_of(error: Exception) -> HttpError:
    """The refusal that an error becomes. What is unexpected is logged, and not told to the caller."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ZbusError):
        status, code, now = next((status, code, now) for kind, status, code, now in _KNOWN if isinstance(error, kind))
        return HttpError(status, code, str(error), now)
    if isinstance(error, HTTPException):
        code, now = _BY_STATUS.get(error.status_code, ("refused", NOTHING_CHANGED))
        return HttpError(error.status_code, code, error.detail, now, error.headers)
    logger.error("a request failed", exc_info=error)
    reason = "this is a bug of zbus; the server's log has its trace"
    return HttpError(500, "internal_error", reason, "The outcome is unknown. What was acknowledged before is safe")


async def answer(connection: HTTPConnection, error: Exception) -> Response:
    """For starlette's `exception_handlers`: the answer, counted by its code."""
    refusal = refusal_of(error)
    figures = getattr(connection.app.state, "figures", None)
    if figures is not None:
        figures.refused[refusal.code] += 1
    return Response(refusal.body(), refusal.status, refusal.headers, "application/json")


HANDLERS: Mapping[Any, Any] = dict.fromkeys((HttpError, ZbusError, HTTPException, Exception), answer)
