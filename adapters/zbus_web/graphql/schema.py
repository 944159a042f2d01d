"""The GraphQL schema: questions about the bus, changes to cursors, and live subscriptions."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from zbus_web.http.http_errors import HttpError, refusal_of
from zbus_web.http.settings import WebSettings
from zbus_web.introspect.live import LiveStatistics
from zbus_web.introspect.views import Views

from . import types as types
from .limits import limits

LIST_MAX = 1000
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Context:
    """What resolvers need, for one request."""

    bus: zbus.Bus
    settings: WebSettings
    views: Views
    live: LiveStatistics
    grant: Permissions


Asked = Info[Context, None]


@contextmanager
def _told() -> Iterator[None]:
    """Errors as GraphQL tells them: the reason as message, code and the rest beside it. A bug is logged, not told."""
    try:
        yield
    except GraphQLError:
        raise
    except Exception as error:
        refusal = refusal_of(error)
        fields = {"code": refusal.code, "now": refusal.now, "status": refusal.status}
        raise GraphQLError(refusal.reason, extensions=fields) from None


def _limited(limit: int) -> int:
    if not 1 <= limit <= LIST_MAX:
        raise HttpError(400, "limit_invalid", f"limit: {limit} is not a number from 1 to {LIST_MAX}")
    return limit


@strawberry.type
class CursorMoved:
    """A cursor after it was moved."""

    name: str
    offset: types.Long
    lag: types.Long


def _nodes(info: Asked) -> list[types.Node]:
    """As /api/nodes."""
    with _told():
        return [types.Node(**each) for each in info.context.views.nodes(info.context.grant)]


def _buses(info: Asked) -> list[types.BusOfNodes]:
    """As /api/buses, with the nodes themselves."""
    with _told():
        views, grant = info.context.views, info.context.grant
        nodes = {each["id"]: types.Node(**each) for each in views.nodes(grant)}
        return [
            types.BusOfNodes(bus=each["bus"], alive=each["alive"], nodes=[nodes[node] for node in each["nodes"]])
            for each in views.buses(grant)
        ]


async def _topics(info: Asked, limit: int = 100) -> list[types.Topic]:
    """As /api/topics."""
    with _told():
        await info.context.views.activity.follow()
        return [types.Topic(**each) for each in info.context.views.topics(info.context.grant, _limited(limit))]


async def _publishers(info: Asked, limit: int = 100) -> list[types.Publisher]:
    """As /api/publishers."""
    with _told():
        await info.context.views.activity.follow()
        found = info.context.views.publishers(info.context.grant, _limited(limit))
        return [types.Publisher(**each) for each in found]


def _subscribers(info: Asked, limit: int = 100) -> list[types.Subscriber]:
    """As /api/subscribers."""
    with _told():
        found = info.context.views.subscribers(info.context.grant)
        return [types.Subscriber(**each) for each in found[: _limited(limit)]]


async def _cursors(info: Asked) -> list[types.Cursor]:
    """As /api/cursors."""
    with _told():
        return [types.Cursor(**each) for each in await info.context.views.cursors(info.context.grant)]


async def _leases(info: Asked) -> list[types.Lease]:
    """As /api/leases."""
    with _told():
        return [types.Lease(**each) for each in await info.context.views.leases(info.context.grant)]


def _schemas(info: Asked) -> list[types.Schema]:
    """As /api/schemas."""
    with _told():
        return [types.Schema(**each) for each in info.context.views.schemas(info.context.grant)]


def _stats(info: Asked) -> types.Stats:
    """As /api/stats."""
    with _told():
        return types.to_stats(info.context.views.stats(info.context.grant))


def _records(info: Asked) -> list[types.Record]:
    """As /api/records."""
    with _told():
        return [types.to_record(each) for each in info.context.views.records(info.context.grant)]


async def _reset_cursor(info: Asked, name: str, offset: types.Long) -> CursorMoved:
    """As POST /api/cursors/{name}/reset."""
    with _told():
        info.context.grant.check_operate()
        return CursorMoved(**await reset_cursor(info.context.bus, name, offset))


async def _delete_cursor(info: Asked, name: str) -> str:
    """As DELETE /api/cursors/{name}."""
    with _told():
        info.context.grant.check_operate()
        await delete_cursor(info.context.bus, name)
        return name


async def _live_events(
    info: Asked,
    keys: list[str],
    from_: Annotated[str, strawberry.argument(name="from")] = "new",
) -> AsyncGenerator[types.Event, None]:
    """As GET /events."""
    context = info.context
    with _told():
        if not 0 < len(keys) <= context.settings.feed_keys_max:
            limit = context.settings.feed_keys_max
            raise HttpError(400, "keys_invalid", f"{len(keys)} key expressions; 1 to {limit} are taken")
        context.grant.check_read(keys)
        try:
            start = read_start(from_)
        except ValueError as error:
            raise HttpError(400, "from_invalid", f"from: {error}") from None
        shows, queue = context.grant.shows, context.settings.feed_queue_events
        async with context.bus.subscribe(*keys, start=start, overflow="spill", queue_events=queue) as sub:
            while True:
                try:
                    event = await sub.next()
                except SchemaInvalid:
                    continue  # told and counted by the bus; the log still has it
                if event is None:
                    return
                if context.grant.is_over:
                    raise HttpError(401, "token_expired", "the token has expired", "Nothing was shown since")
                if shows(event.key):
                    yield types.to_event(event)


async def _live_stats(info: Asked) -> AsyncGenerator[types.LiveStats, None]:
    """As GET /api/live, in short."""
    with _told():
        info.context.grant.check_overview()
    async with info.context.live.listen() as moments:
        async for moment in moments:
            nothing: dict[str, Any] = {"p50": None, "p99": None}
            yield types.LiveStats(
                at=moment.at.isoformat(timespec="milliseconds"),
                **moment.rates,
                commit_ms=types.Latency(**moment.latency.get("commit_ms", nothing)),
                end_to_end_ms=types.Latency(**moment.latency.get("end_to_end_ms", nothing)),
                stats=types.to_stats(moment.stats),
            )


@strawberry.type
class Query:
    """What there is to see."""

    nodes: list[types.Node] = strawberry.field(resolver=_nodes, description="Who is there, this node first")
    buses: list[types.BusOfNodes] = strawberry.field(resolver=_buses, description="Buses and their nodes")
    topics: list[types.Topic] = strawberry.field(
        resolver=_topics, description="Keys with events since this server began, busiest first"
    )
    publishers: list[types.Publisher] = strawberry.field(
        resolver=_publishers, description="Who published since this server began, the last first"
    )
    subscribers: list[types.Subscriber] = strawberry.field(
        resolver=_subscribers, description="Open subscriptions, furthest behind first"
    )
    cursors: list[types.Cursor] = strawberry.field(resolver=_cursors, description="Durable names")
    leases: list[types.Lease] = strawberry.field(resolver=_leases, description="By which transports know who is there")
    schemas: list[types.Schema] = strawberry.field(resolver=_schemas, description="Schemas in force")
    stats: types.Stats = strawberry.field(resolver=_stats, description="What was counted so far")
    records: list[types.Record] = strawberry.field(resolver=_records, description="What went wrong, newest last")


@strawberry.type
class Mutation:
    """What an operator may change."""

    reset_cursor: CursorMoved = strawberry.mutation(
        resolver=_reset_cursor, description="Let a durable name go on after an offset"
    )
    delete_cursor: str = strawberry.mutation(resolver=_delete_cursor, description="Forget a durable name; returns it")


@strawberry.type
class Subscription:
    """What goes on."""

    events: AsyncGenerator[types.Event, None] = strawberry.subscription(
        resolver=_live_events, description="Events as they come, or from a position on; none is missed or repeated"
    )
    stats: AsyncGenerator[types.LiveStats, None] = strawberry.subscription(
        resolver=_live_stats, description="Rates and latencies, once a second"
    )


def is_bug(error: GraphQLError) -> bool:
    """Whether an error is ours, rather than the document's."""
    cause = error.original_error
    return cause is not None and not isinstance(cause, (GraphQLError, MissingQueryError, RecursionError))


class GraphSchema(strawberry.Schema):
    """Errors that were not expected are logged here, and not told to the caller."""

    def process_errors(self, errors: list[GraphQLError], execution_context: ExecutionContext | None = None) -> None:
        """Log what is a bug; a question that was wrong is the business of who asked."""
        for error in filter(is_bug, errors):
            logger.error("a GraphQL resolver failed", exc_info=error.original_error)


def make_schema() -> GraphSchema:
    """The schema, with its limits."""
    return GraphSchema(Query, Mutation, Subscription, extensions=limits(), config=types.CONFIG)
