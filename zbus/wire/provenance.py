"""Provenance: which node an event came from, and which bridges forwarded it."""

from __future__ import annotations

from collections.abc import Callable

from zbus.event import Event
from zbus.headers import Foreign

# Decides whether a bridge forwards an event of another node: returns the bridges that it crossed, or None to leave it.
Forward = Callable[[Event, Foreign], tuple[int, ...] | None]
