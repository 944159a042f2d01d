"""What `zbus top` shows at one moment, wherever it was learnt: from a log, on a transport, or from a server."""

from __future__ import annotations

from typing import Any

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    """A latency in milliseconds: half of the events took no longer, and 99 of 100."""

    p50: float
    p99: float


class KeyRate(msgspec.Struct, frozen=True):
    """One key: how many events were seen since this began to look, and how many a second lately."""

    key: str
    events: int
    events_per_s: float


class CursorLag(msgspec.Struct, frozen=True):
    """One durable name, and how many events it has before it."""

    name: str
    lag: int


class NodeSeen(msgspec.Struct, frozen=True):
    """Another node."""

    name: str
    alive: bool
    has_log: bool
    transport: str = ""


class Frame(msgspec.Struct, frozen=True):
    """One moment. What cannot be known from where this looks is None: a reader of a log sees no deliveries."""

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
    subscribers: int | None = None
    commit_ms: Quantiles | None = None
    end_to_end_ms: Quantiles | None = None
    topics: tuple[KeyRate, ...] = ()
    cursors: tuple[CursorLag, ...] = ()
    nodes: tuple[NodeSeen, ...] = ()
    trouble: str = ""  # why figures are old, or missing


def dropped_of(stats: dict[str, Any]) -> int:
    """All that was dropped, whatever the reason.

    >>> dropped_of({"dropped_queue_full": 2, "dropped_records": 1, "published": 9})
    3
    """
    return sum(value for name, value in stats.items() if name.startswith("dropped_") and isinstance(value, int))
