"""Types of the GraphQL schema. Integers over 31 bits are `Long`; those over 53 bits, the limit of JSON, are text."""

from __future__ import annotations

from typing import Any, NewType

import msgspec
import strawberry
from graphql import GraphQLError
from strawberry.scalars import JSON
from strawberry.schema.config import StrawberryConfig

from zbus.event import Event as BusEvent
from zbus_web.http.event_json import event_json

LONG_MAX = (1 << 53) - 1


def read_long(value: Any) -> int:
    """Parse an integer given as a number or as text. Raises `GraphQLError` if it is not a `Long`."""
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 17:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LONG_MAX:
        raise GraphQLError(f"{str(value)[:40]!r} is not an integer of up to 53 bits")
    return value


Long = NewType("Long", int)
CONFIG = StrawberryConfig(
    scalar_map={
        Long: strawberry.scalar(
            name="Long",
            description="An integer of up to 53 bits",
            serialize=lambda value: value,
            parse_value=read_long,
        )
    }
)


@strawberry.type(description="A node of the mesh, including this one")
class Node:
    """The fields of `zbus.NodeInfo`."""

    id: str
    name: str
    buses: list[str]
    host: str
    pid: int
    version: str
    started_at: str
    last_seen: str
    is_self: bool
    alive: bool
    has_log: bool
    transport: str
    trust: str
    endpoints: list[str]
    publishes: list[str]
    subscribes: list[str]
    serves: list[str]
    truncated: int
    metadata: JSON
    incarnation: str
    protocol: int
    capabilities: list[str]


@strawberry.type(name="Bus", description="A bus and its nodes")
class BusOfNodes:
    """One name of a bus."""

    bus: str
    alive: int
    nodes: list[Node]


@strawberry.type(description="A key with events since this server started")
class Topic:
    """One key."""

    key: str
    events: Long
    events_per_s: float
    bytes: Long
    last_at: str


@strawberry.type(description="A publisher on a key since this server started")
class Publisher:
    """One publisher identity on one key."""

    key: str
    id: str
    sequence: Long
    events: Long
    last_at: str


@strawberry.type(description="The position of a durable subscription")
class Cursor:
    """One cursor."""

    name: str
    offset: Long
    lag: Long
    keys: list[str]
    updated_at: str
    owner: str | None


@strawberry.type(description="An open subscription of this process")
class OpenSubscription:
    """One subscription."""

    key_exprs: list[str]
    durable: str | None
    overflow: str
    live: bool
    queued: int
    dropped: Long
    lag: Long


@strawberry.type(description="A lease of a node in the discovery registry of a transport")
class Lease:
    """One lease."""

    transport: str
    realm: str
    node: str
    endpoints: list[str]
    lease_s: float
    left_s: float
    allocated_by: str
    allocated_at: str
    last_heartbeat_at: str
    pid: int


@strawberry.type(description="A schema for the payloads of matching keys")
class Schema:
    """One active schema."""

    expression: str
    version: int
    mode: str
    hash: str
    schema: JSON
    registered_at: str


@strawberry.type(description="A log record of a problem: a gap, a drop or an error")
class LogRecord:
    """One log record of level WARNING or above."""

    id: Long
    at: str
    level: str
    record: str
    fields: JSON


@strawberry.type(description="Durations in milliseconds; null if there was no measurement")
class Latency:
    """Quantiles of the last second."""

    p50: float | None
    p99: float | None


@strawberry.type(description="Statistics of the bus")
class Stats:
    """The most used statistics, and `all`."""

    published: Long
    delivered: Long
    subscriptions: int
    head: Long | None
    all: JSON


@strawberry.type(description="A snapshot of the bus, and the changes in the second before")
class LiveStats:
    """One snapshot."""

    at: str
    published_per_s: float
    delivered_per_s: float
    commit_ms: Latency
    delivery_ms: Latency
    stats: Stats


@strawberry.type(description="An event, in the JSON form of the whole HTTP API")
class Event:
    """`payload` is set if it is UTF-8, otherwise `payload_base64` is set."""

    offset: Long
    key: str
    publisher_id: str
    sequence: Long
    published_at: str
    published_ns: str
    headers: JSON
    payload: str | None = None
    payload_base64: str | None = None


def to_event(event: BusEvent) -> Event:
    """Convert an event through its JSON form."""
    return Event(**msgspec.json.decode(event_json(event)))


def to_stats(found: dict[str, Any]) -> Stats:
    """Convert the result of `bus.stats()`."""
    return Stats(
        published=found["published"],
        delivered=found["delivered"],
        subscriptions=found["subscriptions"],
        head=found["log"]["head"] if "log" in found else None,
        all=JSON(found),
    )


def to_log_record(found: dict[str, Any]) -> LogRecord:
    """Convert a log record of `ProblemRecords`."""
    fixed = {name: found[name] for name in ("id", "at", "level", "record")}
    return LogRecord(**fixed, fields=JSON({name: value for name, value in found.items() if name not in fixed}))
