"""Start positions: an offset, a time, or an age, as arguments or as text (command line, HTTP)."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Literal

from zbus.errors import ConfigInvalid

OFFSET_MAX = (1 << 63) - 1
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# Times are kept as nanoseconds in 63 bits, from 1970 on.
_TIME_MIN, _TIME_MAX = datetime(1970, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)

Position = int | datetime


def read_start(text: str, time_ns: Callable[[], int]) -> Literal["new", "beginning"] | Position:
    """Parse the start of a subscription: `new`, `beginning`, or a position. Raises `ValueError` with the reason.

    >>> from time import time_ns
    >>> read_start("beginning", time_ns), read_start("42", time_ns)
    ('beginning', 42)
    """
    if text == "new":
        return "new"
    return "beginning" if text == "beginning" else read_position(text, time_ns, "'new', 'beginning', ")


def read_age(text: str) -> float:
    """Parse an age, a number with a unit, into seconds. Raises `ValueError` with the reason.

    >>> read_age("7d"), read_age("1.5h")
    (604800.0, 5400.0)
    """
    found = _AGE.fullmatch(text.strip())
    if not found or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not an age such as 30s, 10m, 12h, 7d or 2w")
    return float(found[1]) * _UNIT_S[found[2]]


def read_position(text: str, time_ns: Callable[[], int], others: str = "") -> Position:
    """Parse an offset, an ISO time, or an age such as `-10m`. Raises `ValueError`; `others` completes its message.

    >>> from time import time_ns
    >>> read_position("42", time_ns), read_position("-10m", lambda: 600 * 10**9).timestamp()
    (42, 0.0)
    """
    text = text.strip()
    if text.isascii() and text.isdigit():
        if len(text) <= 19 and int(text) <= OFFSET_MAX:
            return int(text)
        raise ValueError(f"{text[:40]} is larger than the largest offset, {OFFSET_MAX}")
    try:
        moment = _moment(text, time_ns)
        if _TIME_MIN <= moment.astimezone(UTC) < _TIME_MAX:
            return moment
    except (ValueError, OverflowError, OSError):
        pass
    raise ValueError(f"{text!r} must be {others}an offset, an ISO time from 1970 to 2261, or an age such as -10m")


def _moment(text: str, time_ns: Callable[[], int]) -> datetime:
    if text.startswith("-"):
        return datetime.fromtimestamp(time_ns() / 1e9, UTC) - timedelta(seconds=read_age(text[1:]))
    return datetime.fromisoformat(text)


def check_offset_or_time(name: str, bound: object) -> None:
    """Raise `ConfigInvalid` for the argument `name` if it is not an offset, a datetime or None."""
    if isinstance(bound, bool) or not isinstance(bound, (int, datetime, type(None))):
        raise ConfigInvalid(name, f"{bound!r} must be an offset or a datetime")
    if isinstance(bound, int) and not 0 <= bound <= OFFSET_MAX:
        raise ConfigInvalid(name, f"{bound} must be from 0, which is before the first event, to {OFFSET_MAX}")
    if isinstance(bound, datetime):
        try:
            to_ns(bound)
        except (ValueError, OverflowError) as error:
            raise ConfigInvalid(name, f"{bound} is not a time that this system can convert: {error}") from None


def to_ns(moment: datetime) -> int:
    """Return the Unix nanoseconds of a datetime. A datetime without a zone is local time, as everywhere in Python."""
    whole = int(moment.replace(microsecond=0).timestamp())
    # The log stores 63 bits: a time beyond that matches nothing, or everything.
    return max(-(1 << 62), min(1 << 62, whole * 1_000_000_000 + moment.microsecond * 1000))
