"""Where to start, as people write it: an offset, a time, or an age. For the command line and for HTTP."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Literal

from zbus.util.runtime import REAL

OFFSET_MAX = (1 << 63) - 1
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# Times are kept as nanoseconds in 63 bits, from 1970 on.
_TIME_MIN, _TIME_MAX = datetime(1970, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)

Position = int | datetime


def read_start(text: str) -> Literal["new", "beginning"] | Position:
    """Where a subscription starts: `new`, `beginning`, or a position. Raises `ValueError` with the reason.

    >>> read_start("beginning"), read_start("42")
    ('beginning', 42)
    """
    if text == "new":
        return "new"
    return "beginning" if text == "beginning" else read_position(text, "'new', 'beginning', ")


def read_age(text: str) -> float:
    """Seconds, from a number and a unit. Raises `ValueError` with the reason.

    >>> read_age("7d"), read_age("1.5h")
    (604800.0, 5400.0)
    """
    found = _AGE.fullmatch(text.strip())
    if not found or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not an age such as 30s, 10m, 12h, 7d or 2w")
    return float(found[1]) * _UNIT_S[found[2]]


def read_position(text: str, others: str = "") -> Position:
    """An offset, an ISO time, or an age such as `-10m`; `others` says what else was allowed. Raises `ValueError`.

    >>> read_position("42")
    42
    """
    text = text.strip()
    if text.isascii() and text.isdigit():
        if len(text) <= 19 and int(text) <= OFFSET_MAX:
            return int(text)
        raise ValueError(f"{text[:40]} is over the largest offset, {OFFSET_MAX}")
    try:
        moment = _moment(text)
        if _TIME_MIN <= moment.astimezone(UTC) < _TIME_MAX:
            return moment
    except (ValueError, OverflowError, OSError):
        pass
    raise ValueError(f"{text!r} is none of {others}an offset, an ISO time from 1970 to 2261, or an age such as -10m")


def _moment(text: str) -> datetime:
    if text.startswith("-"):
        return datetime.fromtimestamp(REAL.time_ns() / 1e9, UTC) - timedelta(seconds=read_age(text[1:]))
    return datetime.fromisoformat(text)


def to_ns(moment: datetime) -> int:
    """Unix nanoseconds of a datetime; one without a zone is local time, as everywhere in Python."""
    whole = int(moment.replace(microsecond=0).timestamp())
    # The log counts in 63 bits: beyond that lies only "never", or "always".
    return max(-(1 << 62), min(1 << 62, whole * 1_000_000_000 + moment.microsecond * 1000))
