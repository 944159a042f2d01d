"""Records as lines, for people (text) or for programs (one JSON object a line)."""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import IO, Any, Literal

import msgspec

from zbus.errors import ConfigInvalid

from .records import RUN_ID, logger

_encode = msgspec.json.Encoder(enc_hook=repr).encode


class JsonFormatter(logging.Formatter):
    """A formatter for any handler: one JSON object a line, with `time`, `level`, `record`, `correlation_id` and the
    fields of the record.

    >>> line = logging.makeLogRecord({"levelname": "INFO", "zbus": {"record": "BUS_STARTED", "correlation_id": "7"}})
    >>> JsonFormatter().format(line)[35:]
    '"level":"INFO","record":"BUS_STARTED","correlation_id":"7"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line; a record of another library gets the same shape, with its text as `message`."""
        fields = getattr(record, "zbus", None) or {"correlation_id": RUN_ID, "message": record.getMessage()}
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
        line: dict[str, Any] = {"time": time, "level": record.levelname, **fields}
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exception(error)}
        return as_json(line).decode()


def as_json(fields: dict[str, Any]) -> bytes:
    """Fields as JSON; what has no JSON form is written as Python shows it."""
    try:
        return _encode(fields)
    except (TypeError, ValueError, RecursionError, OverflowError):
        return _encode({str(name): repr(value) for name, value in fields.items()})


def configure_logging(
    form: Literal["text", "json"] = "text", *, level: str | int = "INFO", stream: IO[str] | None = None
) -> logging.Handler:
    """Write the records of this process to a stream (stderr), from `level` on; for programs that set up no logging.

        zbus.configure_logging("json", level="DEBUG")

    Returns the handler, which `logging.getLogger("zbus").removeHandler` takes away again.
    """
    if form not in ("text", "json"):
        raise ConfigInvalid("form", f"{form!r} is neither 'text' nor 'json'")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    try:
        handler.setLevel(level if isinstance(level, int) else level.upper())
    except ValueError as error:
        raise ConfigInvalid("level", f"{level!r} is no level of logging, such as 'INFO'") from error
    logger.addHandler(handler)
    logger.setLevel(min(handler.level, logger.level or handler.level))
    return handler
