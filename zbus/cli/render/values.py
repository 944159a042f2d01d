"""Parsers of option values: start positions, ages and sizes."""

from __future__ import annotations

import re
from time import time_ns
from typing import Literal

import typer

from zbus.deliver.start_position import OFFSET_MAX, Position, read_age, read_position, read_start

__all__ = ["OFFSET_MAX", "Position", "parse_age", "parse_position", "parse_size", "parse_start"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", re.IGNORECASE)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "event"), counted(2_000, "event")
    ('1 event', '2,000 events')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def parse_start(text: str) -> Literal["new", "beginning"] | Position:
    """Parse the start of a subscription: `new`, `beginning`, or a position.

    >>> parse_start("beginning"), parse_start("42")
    ('beginning', 42)
    """
    try:
        return read_start(text, time_ns)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_position(text: str) -> Position:
    """Parse an offset, an ISO time, or an age such as `-10m`."""
    try:
        return read_position(text, time_ns)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_age(text: str) -> float:
    """Parse a number with a unit of time and return seconds.

    >>> parse_age("7d"), parse_age("1.5h")
    (604800.0, 5400.0)
    """
    try:
        return read_age(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_size(text: str) -> int:
    """Parse a size and return bytes. Units are powers of 1024.

    >>> parse_size("64K"), parse_size("1.5GiB")
    (65536, 1610612736)
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " ")) if found else 0
    if not 0 < size <= OFFSET_MAX:
        raise typer.BadParameter(f"{text!r} is not a size such as 500000, 64K, 200M or 1G")
    return size
