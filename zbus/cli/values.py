"""Values of options as people write them: where to start, how old, how large."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Literal

import typer

OFFSET_MAX = (1 << 63) - 1
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", re.IGNORECASE)
# Times are kept as nanoseconds in 63 bits, from 1970 on.
_TIME_MIN, _TIME_MAX = datetime(1970, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)

Position = int | datetime


def parse_start(text: str) -> Literal["new", "beginning"] | Position:
    """Where a subscription starts: `new`, `beginning`, or a position.

    >>> parse_start("beginning"), parse_start("42")
    ('beginning', 42)
    """
    if text == "new":
        return "new"
    return "beginning" if text == "beginning" else _position(text, "'new', 'beginning', ")


def parse_position(text: str) -> Position:
    """An offset, an ISO time, or an age such as `-10m`."""
    return _position(text, "")


def parse_age(text: str) -> float:
    """Seconds, from a number and a unit.

    >>> parse_age("7d"), parse_age("1.5h")
    (604800.0, 5400.0)
    """
    found = _AGE.fullmatch(text.strip())
    if not found or float(found[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is not an age such as 30s, 10m, 12h, 7d or 2w")
    return float(found[1]) * _UNIT_S[found[2]]


def parse_size(text: str) -> int:
    """Bytes, with or without a unit; units are powers of 1024.

    >>> parse_size("64K"), parse_size("1.5GiB")
    (65536, 1610612736)
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " ")) if found else 0
    if not 0 < size <= OFFSET_MAX:
        raise typer.BadParameter(f"{text!r} is not a size such as 500000, 64K, 200M or 1G")
    return size


def _position(text: str, others: str) -> Position:
    text = text.strip()
    if text.isascii() and text.isdigit():
        if int(text) <= OFFSET_MAX:
            return int(text)
        raise typer.BadParameter(f"{text} is over the largest offset, {OFFSET_MAX}")
    try:
        moment = _moment(text)
        if _TIME_MIN <= moment.astimezone(UTC) < _TIME_MAX:
            return moment
    except (ValueError, OverflowError, OSError):
        pass
    raise typer.BadParameter(
        f"{text!r} is none of {others}an offset, an ISO time from 1970 to 2261, or an age such as -10m"
    )


def _moment(text: str) -> datetime:
    if text.startswith("-"):
        return datetime.now(UTC) - timedelta(seconds=parse_age(text[1:]))
    return datetime.fromisoformat(text)
