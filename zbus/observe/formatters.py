"""Formatters for log records: text for people, or one JSON object per line for programs."""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import IO, Any, Literal

import msgspec

from zbus.errors import ConfigInvalid

from .records import current_id, logger

_encode = msgspec.json.Encoder(enc_hook=repr).encode


class JsonFormatter(logging.Formatter):
    """A formatter for any handler: one JSON object per line, with `time`, `level`, `record`, `correlation_id` and the
    fields of the record.

    >>> line = logging.makeLogRecord({"levelname": "INFO", "zbus": {"record": "BUS_STARTED", "correlation_id": "7"}})
    >>> JsonFormatter().format(line)[35:]
    '"level":"INFO","record":"BUS_STARTED","correlation_id":"7"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. A record of another library gets the same shape, with its text as `message`."""
        fields = getattr(record, "zbus", None) or {"correlation_id": current_id(), "message": record.getMessage()}
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
        line: dict[str, Any] = {"time": time, "level": record.levelname, **fields}
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exception(error)}
        return as_json(line).decode()


def as_json(fields: dict[str, Any]) -> bytes:
    """Encode fields as JSON. Values without a JSON form are written as their `repr`."""
    try:
        return _encode(fields)
    except (TypeError, ValueError, RecursionError, OverflowError):
        return _encode({str(name): repr(value) for name, value in fields.items()})


def configure_logging(
    form: Literal["text", "json"] = "text", *, level: str | int = "INFO", stream: IO[str] | None = None
) -> logging.Handler:
    """Write the log records of this process to `stream` (default: stderr), for programs that do not set up logging.

        zbus.configure_logging("json", level="DEBUG")

    Records below `level` are not written. Returns the handler, which `logging.getLogger("zbus").removeHandler` removes.
    Raises `ConfigInvalid` if `form` or `level` is unknown.
    """
    if form not in ("text", "json"):
        raise ConfigInvalid("form", f"{form!r} must be 'text' or 'json'")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    try:
        handler.setLevel(level if isinstance(level, int) else level.upper())
    except ValueError as error:
        raise ConfigInvalid("level", f"{level!r} is not a logging level such as 'INFO'") from error
    logger.addHandler(handler)
    logger.setLevel(min(handler.level, logger.level or handler.level))
    return handler
