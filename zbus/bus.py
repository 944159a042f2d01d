"""The bus: what users call. It holds the node that does the work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .deliver.handlers import Handler, serve
from .deliver.overflow import Overflow
from .deliver.replay import Replay, check_bounds
from .deliver.subscriber import EventSubscriber, Start
from .errors import ConfigInvalid, NoResponders
from .event import Event, Offset
from .introspection import snapshot
from .keys import KeySet, check_key
from .mesh.requests import Handler as Answer
from .node import Node
from .publish.publisher import EventPublisher
from .schema.registry import Schemas
from .scope import Scope
from .session import PUBLISHERS_MAX, Session, Sessions
from .util.identities import Identities

if TYPE_CHECKING:
    from .config import BusConfig
    from .mesh.node_registry import NodeInfo
    from .ports.cache import Cache, Caching

T = TypeVar("T")
H = TypeVar("H", bound=Handler)
A = TypeVar("A", bound=Answer)


def open(  # noqa: A001 - zbus.open reads best
    log: str | os.PathLike[str] | None = None,
    *,
    config: BusConfig | str | os.PathLike[str] | None = None,
    session: Any = None,
    **settings: Any,
) -> Bus:
    """A bus, to be used as `async with zbus.open("app.db") as bus: …`.

    `log` is the path of the log, "memory" for one that ends with the bus, or nothing. Settings are
    the fields of `BusConfig`; what is not given comes from `ZBUS_…` variables and from the TOML file
    that `ZBUS_CONFIG` (or `config`) names. `session` lends the bus a Zenoh session that the
    application already has. Raises `ConfigInvalid` with the field and the reason.
    """
    from .config import BusConfig, load_config

    if isinstance(config, BusConfig):
        if log is not None or settings:
            raise ConfigInvalid("config", "give a BusConfig or single settings, not both")
        return Bus(config, session)
    if log is not None:
        settings["log"] = os.fspath(log) if isinstance(log, os.PathLike) else log
    return Bus(load_config(config, **settings), session)


class Bus:
    """An open bus. All of its methods belong to the event loop that entered it."""

    def __init__(self, config: BusConfig, session: Any = None) -> None:
        self._node = Node(config, session)
        secret = config.session_secret
        self._sessions = Sessions(
            self._node.entry,
            Identities(PUBLISHERS_MAX, self._node.runtime.randbits),
            self.subscribe,
            None if secret is None else secret.get_secret_value().encode(),
        )

    # Opening and closing.

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Open the log and the transports; `async with` does this. If cancelled or failed, nothing stays open."""
        await self._node.start()

    async def aclose(self) -> None:
        """Flush and close everything within `close_timeout_s`; safe to call twice.

        Published events are stored, queued events stay readable, handlers finish the event that they have. If
        cancelled, closing continues in the background and still ends in time.
        """
        await self._node.aclose()

    @property
    def config(self) -> BusConfig:
        """The settings of this bus."""
        return self._node.config

    @property
    def schemas(self) -> Schemas:
        """The schemas that are registered on this bus."""
        return self._node.schemas

    # Publishing.

    async def publisher(self, key: str) -> EventPublisher:
        """A publisher for one concrete key; it has an identity of its own."""
        self._node.check_open("make a publisher")
        return EventPublisher(self._node.entry, key)

    def nodes(self) -> list[NodeInfo]:
        """The nodes that this one knows of, itself first: who they are, what they publish and want, when last seen.

        Those that left, or fell silent, are kept for an hour with `present` false. Alone, it is the only one.
        """
        self._node.check_open("look at nodes")
        return self._node.network.registry.nodes() if self._node.network is not None else []

    async def put(self, *events: Event) -> Sequence[Offset]:
        """Store events that have an identity already: a retry, or events from elsewhere.

        An event whose identity is stored keeps its first offset; nothing is stored twice.
        Without a log they are delivered only. Cancelled, they may or may not be stored.
        """
        node = self._node
        node.check_open("put events")
        if node.tracing is None or not events:
            return await node.entry.put(events)
        with node.tracing.putting(events) as span:
            return await node.entry.put(events, span)

    def namespace(self, name: str) -> Scope:
        """A namespace: the first segment of keys."""
        return Scope(self, name)

    def component(self, namespace: str, name: str) -> Scope:
        """A component: the first two segments of keys."""
        return Scope(self, namespace, name)

    def session(self, session_id: str) -> Session:
        """A session: publishes to the global key and to `sessions/{id}/…` in one commit, and signs tokens for the feed.

        await bus.session("alice-7").publish("events/Todo/1", {"done": True})
        """
        return Session(self._sessions, session_id)

    # Subscribing and reading.

    def subscribe(
        self,
        *key_exprs: str,
        start: Start = "new",
        durable: str | None = None,
        queue_events: int = 1000,
        overflow: Overflow | None = None,
        schema: Any = None,
    ) -> EventSubscriber:
        """A stream of the events that any of the expressions matches.

        `start`: "new", "beginning", an offset (the first one wanted), or a datetime. `durable`: a name
        whose position is kept; it resumes after its last acknowledged event. `schema`: payloads must decode
        to this type.

        `overflow`: what happens when `queue_events` wait. "drop_oldest" (the default) and "drop_newest" drop events and
        raise `SubscriberLagged`. "spill" (the default with a durable name) continues from the log. "block" lets the
        publishers of this node wait and drops none of their events; events of other nodes wait in a backlog of
        bounded size. Beyond that they are read from the log if it has them, and are otherwise dropped with
        `SubscriberLagged`. A subscription that is full never delays events for other subscriptions.

            async with bus.subscribe("shop/*/created", "audit/**") as sub:
                async for event in sub: ...
        """
        return self._node.subscribe(
            *key_exprs, start=start, durable=durable, queue_events=queue_events, overflow=overflow, schema=schema
        )

    def on(self, *key_exprs: str, retries: int | None = None, **options: Any) -> Callable[[H], H]:
        """Run a handler for every event; options as for `subscribe`.

            @bus.on("shop/**", durable="billing")
            async def bill(event): ...

        A handler that raises is reported; with a durable name the event is tried again, without one the next event
        follows. `retries`: how often (with or without a name); after that EVENT_RETRY_LIMIT_EXCEEDED tells which event
        it was, the log still has it, and the next one follows.
        """
        if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
            raise ConfigInvalid("retries", f"{retries!r} is not a number of times")

        def register(handler: H) -> H:
            def begin() -> None:
                node = self._node
                subscription = self.subscribe(*key_exprs, **options)
                run: Handler = handler
                context = None
                if node.tracing is not None:
                    run, context = node.tracing.service(handler, subscription.durable)
                serving = serve(subscription, run, node.count, node.runtime.uniform, retries)
                node.serve(asyncio.get_running_loop().create_task(serving, context=context))

            self._node.begin(begin)
            return handler

        return register

    async def request(
        self,
        key: str,
        payload: Any = b"",
        *,
        timeout: float = 5.0,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
    ) -> Event:
        """Ask whoever serves `key`, on this node or another, and return the reply.

            reply = await bus.request("prices/quote", {"sku": 7}, timeout=2)
            reply.decode(Quote)

        Raises `NoResponders` (nobody serves it now), `RequestTimeout` (it may have been handled), or
        `HandlerFailed` (the handler raised). Cancelled, the handler is cancelled too.
        """
        node = self._node
        node.check_open("ask")
        if node.requests is None:
            raise NoResponders(key)
        if node.tracing is None:
            return await node.requests.request(key, payload, timeout, headers, correlation_id)
        with node.tracing.sending("request", check_key(key), headers, correlation_id) as span:
            return await node.requests.request(key, payload, timeout, span.headers, correlation_id)

    def serve(self, key: str) -> Callable[[A], A]:
        """Answer questions for a key; what the handler returns is the reply, what it raises goes to the asker.

        Raises `TransportUnsupported` (or `start` does) if no transport in use carries requests: raw ones and Dynamo.

        @bus.serve("prices/quote")
        async def quote(question): return {"price": 12}
        """

        def register(handler: A) -> A:
            def begin() -> None:
                requests, tracing = self._node.requests, self._node.tracing
                if requests is None:
                    raise ConfigInvalid("read_only", "a bus that is read-only serves nothing")
                requests.serve(key, handler if tracing is None else tracing.handler(handler))

            check_key(key)
            self._node.begin(begin)
            return handler

        return register

    def span(self, event: Event, operation: str = "process") -> AbstractContextManager[Any]:
        """A span for what a reader does with an event; handlers of `on` and `serve` have theirs already.

            async for event in sub:
                with bus.span(event): ...

        Spans made and events published in the block are of the event's trace. An error that leaves it is
        recorded. It gives OpenTelemetry's span, or None where this bus does not trace.
        """
        tracing = self._node.tracing
        return nullcontext() if tracing is None else tracing.handling(event, operation)

    async def switch_transport(self, url: str, *, overlap_s: float = 2.0) -> None:
        """Move to another transport without losing or repeating an event.

        The new one is heard first, both carry events for `overlap_s`, then the old ones send what they have
        left and close. With a log, what other nodes miss in between they ask for. Cancelled, both stay in use.
        """
        await self._node.switch_transport(url, overlap_s)

    async def receive_on(self, *transports: str) -> None:
        """Of several transports, receive on these only, by name or URL; on all, if none is given.

        The flag of a migration: publishing goes on over all of them, and it can be moved back at any time.
        """
        await self._node.need_network("choose where to receive").receive_on(transports)

    def replay(
        self,
        *key_exprs: str,
        after: int | datetime = 0,
        until: int | datetime | None = None,
        skip_corrupt: bool | None = None,
    ) -> Replay:
        """Stored events, from the log alone: over `after`, up to and including `until` (or the head of now).

        async for event in bus.replay("shop/**", after=1000): ...
        """
        node = self._node
        node.check_open("replay")
        node.need_log("replay")
        check_bounds(after, until)
        skip = node.config.skip_corrupt if skip_corrupt is None else skip_corrupt
        return Replay(node, KeySet(key_exprs or ("**",)), after, until, skip)

    def cache(
        self, *, capacity: int = 10_000, ttl: float | None = None, tti: float | None = None, name: str | None = None
    ) -> Cache:
        """A cache whose entries fall when events say so; it ends with the bus.

        Of `capacity` entries those stay that are used most. `ttl`: seconds that an entry lives, `tti`: seconds that it
        lives unused. `name`: by which `stats()` tells of it.

            todos = bus.cache().invalidate_on("events/Todo/{id}", entry="todo/{id}")
            todo = await todos.load("todo/7", read_todo, 7)
        """
        cache: Cache = self._node.add_cache(name, "cache", (capacity, ttl, tti))
        return cache

    def cached(
        self,
        *,
        key: str | Callable[..., Hashable] | None = None,
        invalidate_on: str | Iterable[str] = (),
        capacity: int = 10_000,
        ttl: float | None = None,
        tti: float | None = None,
        name: str | None = None,
    ) -> Caching:
        """Keep what a function returns, until an event says that it is out of date. Options as for `cache`.

            @bus.cached(invalidate_on="events/Todo/{todo_id}")
            async def todo(todo_id): ...

        `key`: which calls are the same: those with equal arguments, or the text of a template ("todo/{todo_id}"), or
        what a callable makes of the arguments. `invalidate_on`: with `{…}` fields the entries of those arguments fall,
        without any all of them. The function is awaited from then on; a plain one runs on a thread.
        """

        def register(function: Callable[..., Any]) -> Any:
            default = getattr(function, "__qualname__", "function")
            return self._node.add_cache(name, default, (capacity, ttl, tti), (function, key, invalidate_on)).function

        return register

    async def head(self) -> int:
        """The offset of the last stored event; 0 for an empty log."""
        node = self._node
        node.check_open("read the head")
        head = await node.run(node.need_log("head()").head)
        return max(head, node.dispatcher.delivered)  # a log with stale reads may not show yet what was delivered

    def stats(self) -> dict[str, Any]:
        """What was counted and measured so far: the figures that `zbus.metrics` shows to Prometheus. Any thread.

        Counters by name (`published`, `delivered`, `dropped_queue_full`, `gaps`, …: those that are 0 may be missing),
        and groups: `queues`, `latency`, `log`, `cursors` (how many events each durable name is behind; those read by
        other processes as of the last call), `links` and `caches`.
        """
        return snapshot(self._node)

    def diagnostics(self) -> dict[str, Any]:
        """What this bus consists of: its mode, its log and its transports; never a secret."""
        return self._node.diagnostics()

    @property
    def zenoh(self) -> Any:
        """The Zenoh session of this bus, for code that speaks Zenoh itself."""
        self._node.check_open("use its Zenoh session")
        assert self._node.network is not None
        fabrics = [*self._node.network.embedded, *(link.fabric for link in self._node.network.links)]
        return next((fabric.session for fabric in fabrics if hasattr(fabric, "session")), None)
