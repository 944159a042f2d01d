"""Durations as text, in the short form of zbus (90s) and the long form of Spark (30 minutes)."""

from __future__ import annotations

import re

from zbus.errors import ConfigInvalid

_DURATION = re.compile(r"\s*(\d{1,9})\s*(ms|milliseconds?|s|seconds?|m|minutes?|h|hours?|d|days?|w|weeks?)\s*")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}


def milliseconds(field: str, text: str) -> int:
    """Parse a duration. Raises `ConfigInvalid` if it is malformed or 0.

    >>> milliseconds("gap", "30 minutes"), milliseconds("gap", "90s"), milliseconds("gap", "250ms")
    (1800000, 90000, 250)
    """
    found = _DURATION.fullmatch(text)
    taken = int(found[1]) * (1 if found[2].startswith(("ms", "mil")) else _UNIT_MS[found[2][0]]) if found else 0
    if not taken:
        raise ConfigInvalid(field, f"{text!r} is not a duration such as '30 minutes', 90s or 250ms")
    return taken
