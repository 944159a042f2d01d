"""The data of one frame of `zbus top`, from a log, a transport or a server."""

from __future__ import annotations

from typing import Any

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    """Median and 99th percentile of a latency in milliseconds."""

    p50: float
    p99: float


class KeyRate(msgspec.Struct, frozen=True):
    """One key, its number of events since the start, and its current rate."""

    key: str
    events: int
    events_per_s: float


class CursorLag(msgspec.Struct, frozen=True):
    """One durable subscription, and the number of events that it has not acknowledged."""

    name: str
    lag: int


class NodeSeen(msgspec.Struct, frozen=True):
    """Another node."""

    name: str
    alive: bool
    has_log: bool
    transport: str = ""


class Frame(msgspec.Struct, frozen=True):
    """One frame. A field is None if its source does not know it: a log does not contain deliveries."""

    at: str  # ISO time
    source: str
    head: int | None = None
    log_bytes: int | None = None
    published_per_s: float | None = None
    delivered_per_s: float | None = None
    dropped_per_s: float | None = None
    published: int | None = None
    delivered: int | None = None
    dropped: int | None = None
    subscriptions: int | None = None
    commit_ms: Quantiles | None = None
    delivery_ms: Quantiles | None = None
    topics: tuple[KeyRate, ...] = ()
    cursors: tuple[CursorLag, ...] = ()
    nodes: tuple[NodeSeen, ...] = ()
    trouble: str = ""  # why values are old or missing


def dropped_of(stats: dict[str, Any]) -> int:
    """Return the number of dropped events, for any reason.

    >>> dropped_of({"dropped_queue_full": 2, "dropped_records": 1, "published": 9})
    3
    """
    return sum(value for name, value in stats.items() if name.startswith("dropped_") and isinstance(value, int))
