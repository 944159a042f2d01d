"""The bus: the API that users call. The node that it holds does the work."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from .deliver.handlers import Handler, check_async, serve
from .deliver.overflow import Overflow
from .deliver.replay import Replay
from .deliver.start_position import check_offset_or_time
from .deliver.subscriber import EventSubscriber, Start
from .errors import ConfigInvalid, EventInvalid, KeyInvalid, NoResponders
from .event import Event, Offset
from .introspection import snapshot
from .keys import KeySet, check_key
from .mesh.requests import Handler as Answer
from .node import Node
from .publish.publisher import EventPublisher
from .schema.registry import Schemas
from .scope import Scope
from .session import Session
from .util.renamed import unknown_attribute

if TYPE_CHECKING:
    from .config import BusConfig
    from .mesh.node_registry import NodeInfo
    from .ports.cache import Cache, Caching
    from .ports.log import Backup

T = TypeVar("T")
H = TypeVar("H", bound=Handler)
A = TypeVar("A", bound=Answer)

_INSTEAD = {
    "publish": "write: publisher = await bus.publisher(key)",
    "publish_many": "write: publisher = await bus.publisher(key)",
    "emit": "write: publisher = await bus.publisher(key)",
    "close": "write: await bus.aclose(), or use async with",
}
_LOG_NAMES = {"path", "file", "filename", "database", "db", "log_path"}  # what `log` may be called by mistake
_HOW_TO_OPEN = 'write zbus.open("app.db", durability="os")'


def open(  # noqa: A001 - zbus.open reads best
    log: str | os.PathLike[str] | None = None,
    *,
    config: BusConfig | str | os.PathLike[str] | None = None,
    session: Any = None,
    **settings: Any,
) -> Bus:
    """Return a bus for `async with zbus.open("app.db") as bus: …`.

    `log` is the path or URL of the log, "memory" for a log that ends with the bus, or None for no log. Settings are
    the fields of `BusConfig`. Settings that are not given come from `ZBUS_…` variables and from the TOML file that
    `ZBUS_CONFIG` (or `config`) names. `session` is a Zenoh session of the application for the bus to use. Raises
    `ConfigInvalid` with the field and the reason.
    """
    from .config import BusConfig, check_used, load_config

    if isinstance(config, BusConfig):
        if log is not None or settings:
            raise ConfigInvalid("config", "give a BusConfig or single settings, not both")
        return Bus(config, session)
    if config is not None and not isinstance(config, (str, os.PathLike)):
        kind = type(config).__name__
        raise ConfigInvalid("config", f"must be a BusConfig or the path of a TOML file, not {kind}: {_HOW_TO_OPEN}")
    for name in _LOG_NAMES & settings.keys():
        raise ConfigInvalid(name, f"there is no such setting; the log is the first argument: {_HOW_TO_OPEN}")
    if log is not None:
        settings["log"] = os.fspath(log) if isinstance(log, os.PathLike) else log
    loaded = load_config(config, **settings)
    if session is None:  # a session of the application connects the bus, whatever the settings say
        check_used(loaded, settings)
    return Bus(loaded, session)


class Bus:
    """An open bus. All of its methods belong to the event loop that entered it, except `stats`."""

    def __init__(self, config: BusConfig, session: Any = None) -> None:
        if not hasattr(config, "session_secret"):
            raise TypeError(f'zbus.Bus takes a BusConfig, not {type(config).__name__}: write zbus.open("app.db")')
        self._node = Node(config, session)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise `AttributeError`, with the call that replaces a name which other event buses have."""
        raise unknown_attribute("'Bus' object", name, {}, _INSTEAD)

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
        """Return a publisher for one concrete key. Each publisher has its own identity.

        orders = await bus.publisher("shop/orders/created")
        """
        self._node.entry.check_usable("make a publisher")
        return EventPublisher(self._node.entry, key)

    def nodes(self) -> list[NodeInfo]:
        """Return the known nodes, this one first, with their keys and subscriptions, and when each was last seen.

        A node that left, or that stopped announcing itself, stays in the list for an hour with `alive` false.
        """
        self._node.check_open("look at nodes")
        return self._node.network.registry.nodes() if self._node.network is not None else []

    async def put(self, *events: Event) -> Sequence[Offset]:
        """Publish events that already have an identity. Idempotent.

        For retries, and for events from another system. An event whose identity is already stored keeps its first
        offset, and nothing is stored twice. If retention has removed it within `dedup_s` seconds, the offset is the
        log's low-water mark. Without a log, the events are only delivered. Up to 1,000 events are stored in one commit,
        completely or not at all; the first invalid event raises before any is stored.

        Raises `IdentityConflict` if another event, with another key or payload, is stored under an identity; the other
        events of that commit are stored. If an error is raised after some were stored, its note has their number. If
        cancelled, the events may or may not have been stored: put the same events again.
        """
        node = self._node
        node.entry.check_usable("put events")
        for event in events:
            if not isinstance(event, Event):
                raise EventInvalid(
                    f"put takes events, as put(one, two), not {type(event).__name__}; nothing was stored"
                )
            if not isinstance(event.key, str):  # it may not even be hashable
                raise KeyInvalid(event.key, f"a key is text, not {type(event.key).__name__}")
        if node.tracing is None or not events:
            return await node.entry.put(events)
        with node.tracing.putting(events) as span:
            return await node.entry.put(events, span)

    def namespace(self, name: str) -> Scope:
        """Return the scope of a namespace, which is the first segment of keys."""
        return Scope(self, name)

    def component(self, namespace: str, name: str) -> Scope:
        """Return the scope of a component, which is the first two segments of keys."""
        return Scope(self, namespace, name)

    def session(self, session_id: str) -> Session:
        """Return a session: it publishes to a key and to `sessions/{id}/…` in one commit, and signs tokens.

        await bus.session("alice-7").publish("events/Todo/1", {"done": True})
        """
        return Session(self._node.sessions, session_id)

    # Subscribing and reading.

    def subscribe(
        self,
        *key_exprs: str,
        start: Start = "new",
        after: int | datetime | None = None,
        durable: str | None = None,
        queue_events: int = 1000,
        overflow: Overflow | None = None,
        schema: Any = None,
    ) -> EventSubscriber:
        """Return a stream of the events that match any of the key expressions.

        `start`: "new", "beginning", an offset or a datetime; the event at that offset or time is included. `after`: an
        offset or a datetime instead, which is excluded, as in `replay`. `durable`: the name of a durable subscription,
        which resumes after its last acknowledged event. `schema`: the type that payloads must decode to.

        `overflow`: the policy when `queue_events` events are queued. "drop_oldest" (the default) and "drop_newest" drop
        events and raise `SubscriberLagged`. "spill" (the default of a durable subscription) continues from the log.
        "block" makes the publishers of this node wait and drops none of their events; events of other nodes wait in a
        backlog of bounded size. Beyond that they are read from the log if it has them, and are otherwise dropped with
        `SubscriberLagged`. A full subscription never delays events for other subscriptions.

            async with bus.subscribe("shop/*/created", "audit/**") as sub:
                async for event in sub: ...
        """
        return self._node.subscribe(
            *key_exprs,
            start=start,
            after=after,
            durable=durable,
            queue_events=queue_events,
            overflow=overflow,
            schema=schema,
        )

    def on(self, *key_exprs: str, retries: int | None = None, **options: Any) -> Callable[[H], H]:
        """Run a handler for every event. Options as for `subscribe`.

            @bus.on("shop/**", durable="billing")
            async def bill(event): ...

        If the handler raises, the error is logged and counted. A durable subscription then retries the same event; any
        other continues with the next event. `retries`: the maximum number of retries, durable or not. After the last
        one, EVENT_RETRY_LIMIT_EXCEEDED names the event, which stays in the log, and the next event follows.
        """
        if key_exprs and callable(key_exprs[0]):
            raise ConfigInvalid("key_exprs", 'write @bus.on("shop/**"): the decorator needs a key expression')
        if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
            raise ConfigInvalid("retries", f"{retries!r} must be a whole number, at least 0")

        def register(handler: H) -> H:
            check_async(handler, "@bus.on")

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
        """Send a request to a node that serves `key`, this one or another, and return the reply.

            reply = await bus.request("prices/quote", {"sku": 7}, timeout=2)
            reply.decode(Quote)

        Raises `NoResponders` if no node serves the key, `RequestTimeout` if no reply arrives in time (the request may
        have been handled), and `HandlerFailed` if the handler raised. If cancelled, the handler is cancelled too.
        """
        node = self._node
        node.entry.check_usable("send a request")
        if node.requests is None:
            raise NoResponders(key)
        if node.tracing is None:
            return await node.requests.request(key, payload, timeout, headers, correlation_id)
        with node.tracing.sending("request", check_key(key, "a request goes"), headers, correlation_id) as span:
            return await node.requests.request(key, payload, timeout, span.headers, correlation_id)

    def serve(self, key: str) -> Callable[[A], A]:
        """Serve the requests for a key. The handler's result is the reply; its exception goes to the requester.

            @bus.serve("prices/quote")
            async def quote(request): return {"price": 12}

        Raises `TransportUnsupported` (or `start` does) if no transport in use carries requests (raw ones, Dynamo).
        """

        def register(handler: A) -> A:
            check_async(handler, "@bus.serve")

            def begin() -> None:
                requests, tracing = self._node.requests, self._node.tracing
                if requests is None:
                    raise ConfigInvalid("read_only", "a read-only bus cannot serve requests")
                requests.serve(key, handler if tracing is None else tracing.handler(handler))

            check_key(key, "a request goes")
            self._node.begin(begin)
            return handler

        return register

    def span(self, event: Event, operation: str = "process") -> AbstractContextManager[Any]:
        """Return a span for processing an event. Handlers of `on` and `serve` already run in one.

            async for event in sub:
                with bus.span(event): ...

        Spans made and events published in the block belong to the event's trace. An exception that leaves the block is
        recorded. The block gets OpenTelemetry's span, or None if this bus does not trace.
        """
        tracing = self._node.tracing
        return nullcontext() if tracing is None else tracing.handling(event, operation)

    async def switch_transport(self, url: str, *, overlap_s: float = 2.0) -> None:
        """Move to another transport without losing or repeating an event.

        The bus subscribes on the new transport first, uses both for `overlap_s` seconds, and then sends what is left on
        the old ones and closes them. With a log, other nodes request the events that they miss in between. If
        cancelled, both transports stay in use.
        """
        if isinstance(overlap_s, bool) or not isinstance(overlap_s, (int, float)) or not 0 <= overlap_s < math.inf:
            raise ConfigInvalid("overlap_s", f"{overlap_s!r} must be a number of seconds, at least 0")
        await self._node.switch_transport(url, overlap_s)

    async def receive_on(self, *transports: str) -> None:
        """Receive only on these transports, given by name or URL; on all of them if none is given.

        This is the switch of a migration: publishing continues on all transports, and the switch can be reversed.
        """
        await self._node.need_network("choose where to receive").receive_on(transports)

    def replay(
        self,
        *key_exprs: str,
        after: int | datetime = 0,
        until: int | datetime | None = None,
        skip_corrupt: bool | None = None,
    ) -> Replay:
        """Iterate over stored events after `after`, up to and including `until` (default: the head when it starts).

        Both bounds are an offset or a datetime. Events come only from the log.

            async for event in bus.replay("shop/**", after=1000): ...
        """
        node = self._node
        node.check_open("replay")
        node.need_log("replay")
        check_offset_or_time("after", after)
        check_offset_or_time("until", until)
        skip = node.config.skip_corrupt if skip_corrupt is None else skip_corrupt
        return Replay(node, KeySet(key_exprs or ("**",)), after, until, skip)

    def cache(
        self, *, capacity: int = 10_000, ttl: float | None = None, tti: float | None = None, name: str | None = None
    ) -> Cache:
        """Return a cache whose entries are invalidated by events. It closes with the bus.

        Beyond `capacity` entries, the least used ones are evicted. `ttl`: seconds until an entry expires; `tti`:
        seconds without use until it expires. `name`: the name of this cache in `stats()`.

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
        """Cache the results of a function until an event invalidates them. Options as for `cache`.

            @bus.cached(invalidate_on="events/Todo/{todo_id}")
            async def todo(todo_id): ...

        `key`: the identity of a call: its arguments (the default), a template ("todo/{todo_id}"), or the result of a
        callable that gets the arguments. `invalidate_on`: an event invalidates the entries whose arguments equal the
        expression's `{…}` fields, or every entry if it has no fields. The decorated function must be awaited; a plain
        function runs on a thread.
        """

        def register(function: Callable[..., Any]) -> Any:
            default = getattr(function, "__qualname__", "function")
            return self._node.add_cache(name, default, (capacity, ttl, tti), (function, key, invalidate_on)).function

        return register

    async def head(self) -> int:
        """Return the offset of the last stored event, or 0 if the log is empty."""
        node = self._node
        node.check_open("read the head")
        head = await node.run(node.need_log("head()").head)
        return max(head, node.dispatcher.delivered)  # a log with stale reads may lag behind the delivered events

    async def backup(
        self, target: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
    ) -> Backup:
        """Back up the log into a file, or into a folder if `target` is one or ends with a slash, and return its cut.

            made = await bus.backup("backups/app.zbus")
            made.cut, made.added

        The bus stays in use. The backup contains everything up to one offset, the cut: events, cursors,
        schemas, positions in other logs, and the cold tier, which needs a folder. If `target` has a backup of this log
        already, only the events since then are added. `progress` is called on a thread with the number of events that
        were copied, and of all that will be. `zbus log restore` makes a log of it.

        Raises `ConfigInvalid` if `target` has a backup of another history. If cancelled or failed, or if the bus is
        closed, an earlier backup stays as it was, and a new one is not made.
        """
        node = self._node
        node.check_open("back up the log")
        return await node.backup(os.fspath(target), progress)

    def stats(self) -> dict[str, Any]:
        """Return the statistics of this bus; `zbus.metrics` exports them to Prometheus. Any thread may call it.

        Counters by name (`published`, `delivered`, `dropped_queue_full`, `gaps`, …; a counter that is 0 may be absent),
        and groups: `queues`, `latency`, `log`, `cursors` (the lag of each durable subscription in events; for those of
        other processes, as of the last call), `links` and `caches`.
        """
        return snapshot(self._node)

    def diagnostics(self) -> dict[str, Any]:
        """Return the mode, the log and the transports of this bus, without secrets."""
        return self._node.diagnostics()

    @property
    def zenoh(self) -> Any:
        """The Zenoh session of this bus, for code that uses Zenoh directly; None without Zenoh.

        Raises `ConfigInvalid` if the bus is read-only.
        """
        network = self._node.need_network("use its Zenoh session")
        fabrics = [*network.embedded, *(link.fabric for link in network.links)]
        return next((fabric.session for fabric in fabrics if hasattr(fabric, "session")), None)
