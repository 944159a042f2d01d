"""The GraphQL schema: queries about the bus, mutations of cursors, and live subscriptions."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import time_ns
from typing import Annotated, Any

import strawberry
from graphql import GraphQLError
from strawberry.exceptions import MissingQueryError
from strawberry.types import Info
from strawberry.types.execution import ExecutionContext

import zbus
from zbus.deliver.start_position import read_start
from zbus.errors import SchemaInvalid
from zbus_web.access.permissions import Permissions
from zbus_web.events.cursors import delete_cursor, reset_cursor
from zbus_web.http.http_errors import HttpError, to_http_error
from zbus_web.http.settings import WebSettings
from zbus_web.introspect.live import LiveStatistics
from zbus_web.introspect.views import Views

from . import types as types
from .limits import limits

LIST_MAX = 1000
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Context:
    """The context of resolvers, for one request."""

    bus: zbus.Bus
    settings: WebSettings
    views: Views
    live: LiveStatistics
    permissions: Permissions


RequestInfo = Info[Context, None]


@contextmanager
def _graphql_errors() -> Iterator[None]:
    """Convert errors to GraphQL errors, with code, state and status as extensions. A bug is logged, without details."""
    try:
        yield
    except GraphQLError:
        raise
    except Exception as error:
        found = to_http_error(error)
        fields = {"code": found.code, "state": found.state, "status": found.status}
        raise GraphQLError(found.message, extensions=fields) from None


def _limited(limit: int) -> int:
    if not 1 <= limit <= LIST_MAX:
        raise HttpError(400, "invalid_limit", f"limit: {limit} must be a number from 1 to {LIST_MAX}")
    return limit


@strawberry.type
class CursorMoved:
    """A cursor after a reset."""

    name: str
    offset: types.Long
    lag: types.Long


def _nodes(info: RequestInfo) -> list[types.Node]:
    """Return the same as /api/nodes."""
    with _graphql_errors():
        return [types.Node(**each) for each in info.context.views.nodes(info.context.permissions)]


def _buses(info: RequestInfo) -> list[types.BusOfNodes]:
    """Return the same as /api/buses, with the nodes themselves."""
    with _graphql_errors():
        views, permissions = info.context.views, info.context.permissions
        nodes = {each["id"]: types.Node(**each) for each in views.nodes(permissions)}
        return [
            types.BusOfNodes(bus=each["bus"], alive=each["alive"], nodes=[nodes[node] for node in each["nodes"]])
            for each in views.buses(permissions)
        ]


async def _topics(info: RequestInfo, limit: int = 100) -> list[types.Topic]:
    """Return the same as /api/topics."""
    with _graphql_errors():
        await info.context.views.activity.follow()
        return [types.Topic(**each) for each in info.context.views.topics(info.context.permissions, _limited(limit))]


async def _publishers(info: RequestInfo, limit: int = 100) -> list[types.Publisher]:
    """Return the same as /api/publishers."""
    with _graphql_errors():
        await info.context.views.activity.follow()
        found = info.context.views.publishers(info.context.permissions, _limited(limit))
        return [types.Publisher(**each) for each in found]


def _subscriptions(info: RequestInfo, limit: int = 100) -> list[types.OpenSubscription]:
    """Return the same as /api/subscriptions."""
    with _graphql_errors():
        found = info.context.views.subscriptions(info.context.permissions)
        return [types.OpenSubscription(**each) for each in found[: _limited(limit)]]


async def _cursors(info: RequestInfo) -> list[types.Cursor]:
    """Return the same as /api/cursors."""
    with _graphql_errors():
        return [types.Cursor(**each) for each in await info.context.views.cursors(info.context.permissions)]


async def _leases(info: RequestInfo) -> list[types.Lease]:
    """Return the same as /api/leases."""
    with _graphql_errors():
        return [types.Lease(**each) for each in await info.context.views.leases(info.context.permissions)]


def _schemas(info: RequestInfo) -> list[types.Schema]:
    """Return the same as /api/schemas."""
    with _graphql_errors():
        return [types.Schema(**each) for each in info.context.views.schemas(info.context.permissions)]


def _stats(info: RequestInfo) -> types.Stats:
    """Return the same as /api/stats."""
    with _graphql_errors():
        return types.to_stats(info.context.views.stats(info.context.permissions))


def _log_records(info: RequestInfo) -> list[types.LogRecord]:
    """Return the same as /api/log-records."""
    with _graphql_errors():
        return [types.to_log_record(each) for each in info.context.views.log_records(info.context.permissions)]


async def _reset_cursor(info: RequestInfo, name: str, offset: types.Long) -> CursorMoved:
    """Do the same as POST /api/cursors/{name}/reset."""
    with _graphql_errors():
        info.context.permissions.check_operate()
        return CursorMoved(**await reset_cursor(info.context.bus, name, offset))


async def _delete_cursor(info: RequestInfo, name: str) -> str:
    """Do the same as DELETE /api/cursors/{name}."""
    with _graphql_errors():
        info.context.permissions.check_operate()
        await delete_cursor(info.context.bus, name)
        return name


async def _live_events(
    info: RequestInfo,
    keys: list[str],
    from_: Annotated[str, strawberry.argument(name="from")] = "new",
) -> AsyncGenerator[types.Event, None]:
    """Yield the same events as GET /events."""
    context = info.context
    with _graphql_errors():
        if not 0 < len(keys) <= context.settings.stream_keys_max:
            limit = context.settings.stream_keys_max
            raise HttpError(400, "invalid_keys", f"keys: give 1 to {limit} key expressions, not {len(keys)}")
        context.permissions.check_read(keys)
        try:
            start = read_start(from_, time_ns)
        except ValueError as error:
            raise HttpError(400, "invalid_from", f"from: {error}") from None
        shows, queue = context.permissions.shows, context.settings.stream_queue_events
        async with context.bus.subscribe(*keys, start=start, overflow="spill", queue_events=queue) as sub:
            while True:
                try:
                    event = await sub.next()
                except SchemaInvalid:
                    continue  # The bus has logged and counted it, and the log still has the event.
                if event is None:
                    return
                if context.permissions.is_expired:
                    raise HttpError(401, "token_expired", "the token has expired", "No event was sent since then")
                if shows(event.key):
                    yield types.to_event(event)


async def _live_stats(info: RequestInfo) -> AsyncGenerator[types.LiveStats, None]:
    """Yield a summary of each snapshot of GET /api/live."""
    with _graphql_errors():
        info.context.permissions.check_overview()
    async with info.context.live.listen() as snapshots:
        async for snapshot in snapshots:
            nothing: dict[str, Any] = {"p50": None, "p99": None}
            yield types.LiveStats(
                at=snapshot.at.isoformat(timespec="milliseconds"),
                **snapshot.rates,
                commit_ms=types.Latency(**snapshot.latency.get("commit_ms", nothing)),
                delivery_ms=types.Latency(**snapshot.latency.get("delivery_ms", nothing)),
                stats=types.to_stats(snapshot.stats),
            )


@strawberry.type
class Query:
    """Queries."""

    nodes: list[types.Node] = strawberry.field(resolver=_nodes, description="The nodes, this node first")
    buses: list[types.BusOfNodes] = strawberry.field(resolver=_buses, description="Buses and their nodes")
    topics: list[types.Topic] = strawberry.field(
        resolver=_topics, description="Keys with events since this server started, busiest first"
    )
    publishers: list[types.Publisher] = strawberry.field(
        resolver=_publishers, description="Publishers since this server started, the most recent first"
    )
    subscriptions: list[types.OpenSubscription] = strawberry.field(
        resolver=_subscriptions, description="Open subscriptions, the largest lag first"
    )
    cursors: list[types.Cursor] = strawberry.field(resolver=_cursors, description="Cursors of durable subscriptions")
    leases: list[types.Lease] = strawberry.field(
        resolver=_leases, description="Leases in the discovery registries of the transports"
    )
    schemas: list[types.Schema] = strawberry.field(resolver=_schemas, description="Active schemas")
    stats: types.Stats = strawberry.field(resolver=_stats, description="Statistics of the bus")
    log_records: list[types.LogRecord] = strawberry.field(
        resolver=_log_records, description="Log records of problems, newest last"
    )


@strawberry.type
class Mutation:
    """Mutations, for operators."""

    reset_cursor: CursorMoved = strawberry.mutation(resolver=_reset_cursor, description="Move a cursor to an offset")
    delete_cursor: str = strawberry.mutation(resolver=_delete_cursor, description="Delete a cursor; returns its name")


@strawberry.type
class Subscription:
    """Subscriptions."""

    events: AsyncGenerator[types.Event, None] = strawberry.subscription(
        resolver=_live_events,
        description="Events as they are published, or from a position; none is missed or repeated",
    )
    stats: AsyncGenerator[types.LiveStats, None] = strawberry.subscription(
        resolver=_live_stats, description="Rates and latencies, once a second"
    )


def is_bug(error: GraphQLError) -> bool:
    """Return whether an error is a bug of the server rather than a fault of the document."""
    cause = error.original_error
    return cause is not None and not isinstance(cause, (GraphQLError, MissingQueryError, RecursionError))


class GraphSchema(strawberry.Schema):
    """Schema that logs unexpected errors; their details are not sent to the client."""

    def process_errors(self, errors: list[GraphQLError], execution_context: ExecutionContext | None = None) -> None:
        """Log the errors that are bugs. Faults of the document are only reported to the client."""
        for error in filter(is_bug, errors):
            logger.error("a GraphQL resolver failed", exc_info=error.original_error)


def make_schema() -> GraphSchema:
    """Return the schema with its limits."""
    return GraphSchema(Query, Mutation, Subscription, extensions=limits(), config=types.CONFIG)
