"""The types of the GraphQL schema. Numbers that may have more than 31 bits are `Long`, or text where JSON's end."""

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
    """A whole number, as a number or as text."""
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 17:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LONG_MAX:
        raise GraphQLError(f"{str(value)[:40]!r} is no whole number of up to 53 bits")
    return value


Long = NewType("Long", int)
CONFIG = StrawberryConfig(
    scalar_map={
        Long: strawberry.scalar(
            name="Long",
            description="A whole number of up to 53 bits",
            serialize=lambda value: value,
            parse_value=read_long,
        )
    }
)


@strawberry.type(description="A node of the mesh, this one included")
class Node:
    """As `zbus.NodeInfo`."""

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


@strawberry.type(name="Bus", description="A bus and the nodes that belong to it")
class BusOfNodes:
    """One name of a bus."""

    bus: str
    alive: int
    nodes: list[Node]


@strawberry.type(description="A key with events since this server began")
class Topic:
    """One key."""

    key: str
    events: Long
    events_per_s: float
    bytes: Long
    last_at: str


@strawberry.type(description="Who published on a key since this server began")
class Publisher:
    """One identity on one key."""

    key: str
    id: str
    sequence: Long
    events: Long
    last_at: str


@strawberry.type(description="A durable name and how far it is")
class Cursor:
    """One cursor."""

    name: str
    offset: Long
    lag: Long
    keys: list[str]
    updated_at: str
    owner: str | None


@strawberry.type(description="A subscription that is open in this process")
class Subscriber:
    """One subscription."""

    key_exprs: list[str]
    durable: str | None
    overflow: str
    live: bool
    queued: int
    dropped: Long
    lag: Long


@strawberry.type(description="By which a transport knows that a node is there")
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


@strawberry.type(description="What the payloads of some keys must look like")
class Schema:
    """One schema that is in force."""

    expression: str
    version: int
    mode: str
    hash: str
    schema: JSON
    registered_at: str


@strawberry.type(description="Something that went wrong: a gap, a drop, an error")
class Record:
    """One record of level WARNING and above."""

    id: Long
    at: str
    level: str
    record: str
    fields: JSON


@strawberry.type(description="How long something took, in milliseconds; null where nothing was measured")
class Latency:
    """Quantiles of the last second."""

    p50: float | None
    p99: float | None


@strawberry.type(description="What was counted so far")
class Stats:
    """The most asked for, and everything."""

    published: Long
    delivered: Long
    subscribers: int
    head: Long | None
    all: JSON


@strawberry.type(description="The bus at one moment, and what happened in the second before")
class LiveStats:
    """One moment."""

    at: str
    published_per_s: float
    delivered_per_s: float
    commit_ms: Latency
    end_to_end_ms: Latency
    stats: Stats


@strawberry.type(description="An event, as everywhere over HTTP")
class Event:
    """`payload` where it is UTF-8, `payload_base64` where it is not."""

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
    """The one JSON form, as an object."""
    return Event(**msgspec.json.decode(event_json(event)))


def to_stats(found: dict[str, Any]) -> Stats:
    """From `bus.stats()`."""
    return Stats(
        published=found["published"],
        delivered=found["delivered"],
        subscribers=found["subscribers"],
        head=found["log"]["head"] if "log" in found else None,
        all=JSON(found),
    )


def to_record(found: dict[str, Any]) -> Record:
    """From the ring of records."""
    fixed = {name: found[name] for name in ("id", "at", "level", "record")}
    return Record(**fixed, fields=JSON({name: value for name, value in found.items() if name not in fixed}))
