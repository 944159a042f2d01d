"""HTTP errors: one JSON form for every response that is not a success.

    {"error": {"code": "invalid_key", "message": "what and why", "state": "the state of the data, and what to do"}}

`code` is stable and meant for programs. Errors of zbus, of invalid requests and of the router are all converted here,
and nowhere else.
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
from zbus.errors import LogError, LogWriterFailed, ZbusError

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode

NOTHING_STORED = "Nothing was stored. Fix the request and send it again"
NOTHING_CHANGED = "Nothing was changed. Fix the request and send it again"

# Status, code and state for each error of zbus. The first class that matches applies.
_KNOWN: tuple[tuple[type[ZbusError], int, str, str], ...] = (
    (zbus_errors.KeyInvalid, 400, "invalid_key", NOTHING_STORED),
    (zbus_errors.EventTooLarge, 413, "event_too_large", "Nothing was stored. Send less, or raise payload_bytes_max"),
    (zbus_errors.SchemaInvalid, 422, "schema_violated", NOTHING_STORED),
    (zbus_errors.PayloadInvalid, 422, "invalid_payload", NOTHING_STORED),
    (zbus_errors.EventInvalid, 400, "invalid_event", NOTHING_STORED),
    (
        zbus_errors.SchemaError,
        409,
        "schema_rejected",
        "Nothing was changed. The schema that was registered before is still active",
    ),
    (zbus_errors.LogReadOnly, 409, "log_read_only", "Nothing was stored. Publish in the process that owns the log"),
    (zbus_errors.LogRequired, 409, "log_required", "This bus keeps no log. Start it with one"),
    (
        zbus_errors.LogFull,
        507,
        "log_full",
        "Not stored; events stored before are safe. Free space, then send it again",
    ),
    (
        zbus_errors.IdentityConflict,
        409,
        "identity_conflict",
        "Not stored; the event that has this identity is unchanged. Use another identity",
    ),
    (zbus_errors.LogTrimmed, 410, "log_trimmed", "The remaining events can be read. Start after `low_water`"),
    (zbus_errors.EventCorrupt, 500, "event_corrupt", "The events around it can be read. Continue after its offset"),
    (LogWriterFailed, 503, "log_writer_failed", "Events acknowledged before are safe. Restart the server"),
    (LogError, 503, "log_failed", "Events acknowledged before are safe. Send the request again later"),
    (zbus_errors.CursorError, 409, "cursor_rejected", "No position was changed"),
    (zbus_errors.SessionTokenInvalid, 401, "invalid_token", "Nothing was read or changed. Request a new token"),
    (zbus_errors.ConfigInvalid, 400, "invalid_value", NOTHING_CHANGED),
    (zbus_errors.BusClosed, 503, "bus_closed", "Nothing was stored by this request. The server is stopping"),
    (zbus_errors.WrongLoop, 500, "wrong_loop", NOTHING_CHANGED),
    (zbus_errors.TransportError, 502, "transport_failed", "Stored events are safe and will be sent again"),
    (ZbusError, 500, "failed", "Events acknowledged before are safe"),
)
# The same for an event that the log did not store, or may not have stored. See `LogError.outcome`.
_UNKNOWN = "It may or may not be stored. Send it again with its Idempotency-Key; without one, look in the log first"
_BY_OUTCOME: dict[tuple[type[ZbusError], str | None], tuple[int, str, str]] = {
    (LogError, "refused"): (503, "not_stored", "Not stored; events stored before are safe. Send it again"),
    (LogError, "unknown"): (503, "unknown_outcome", _UNKNOWN),
    (LogWriterFailed, "refused"): (503, "log_writer_failed", "Not stored. Restart the server, then send it again"),
    (LogWriterFailed, "unknown"): (503, "unknown_outcome", f"{_UNKNOWN}. Restart the server before"),
}
_BY_STATUS = {
    404: ("not_found", "Nothing was changed. See `zbus serve --help` and docs/web.md"),
    405: ("method_not_allowed", NOTHING_CHANGED),
}


class HttpError(Exception):
    """A response that is not a success: an HTTP status, a code for programs, and texts for people.

    >>> HttpError(400, "invalid_from", "from: not a time", "Nothing was changed").body()
    b'{"error":{"code":"invalid_from","message":"from: not a time","state":"Nothing was changed"}}'
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        state: str = NOTHING_CHANGED,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, code, message, state)
        self.status, self.code, self.message, self.state = status, code, message, state
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """Return the JSON body of the response."""
        return _encode({"error": {"code": self.code, "message": self.message, "state": self.state}})


def to_http_error(error: Exception) -> HttpError:
    """Convert an error to an `HttpError`. An unexpected error is logged, and its details are not sent to the client."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, LogError) and (found := _BY_OUTCOME.get((type(error), error.outcome))) is not None:
        status, code, state = found
        return HttpError(status, code, str(error), state)
    if isinstance(error, ZbusError):
        _, status, code, state = next(row for row in _KNOWN if isinstance(error, row[0]))
        return HttpError(status, code, str(error), state)
    if isinstance(error, HTTPException):
        code, state = _BY_STATUS.get(error.status_code, ("rejected", NOTHING_CHANGED))
        return HttpError(error.status_code, code, error.detail, state, error.headers)
    logger.error("a request failed", exc_info=error)
    message = "this is a bug in zbus; the server's log has the traceback"
    return HttpError(500, "internal_error", message, "The outcome is unknown. Events acknowledged before are safe")


async def respond(connection: HTTPConnection, error: Exception) -> Response:
    """Return the response for an error and count it by its code. Used as an exception handler of starlette."""
    rejection = to_http_error(error)
    metrics = getattr(connection.app.state, "metrics", None)
    if metrics is not None:
        metrics.rejected[rejection.code] += 1
    return Response(rejection.body(), rejection.status, rejection.headers, "application/json")


HANDLERS: Mapping[Any, Any] = dict.fromkeys((HttpError, ZbusError, HTTPException, Exception), respond)
