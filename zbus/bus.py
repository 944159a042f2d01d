"""The bus: one per process and event loop. It joins publishers, the log, the router and the fabric."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from .deliver.handlers import Handler, serve
from .deliver.replay import Replay
from .deliver.subscriber import EventSubscriber, Overflow, Start, check_options
from .errors import BusClosed, ConfigInvalid, FabricLacks, LogMissing, NobodyAnswers
from .event import Event
from .headers import encode_headers
from .keys import KeySet, check_key
from .mesh.requests import Handler as Answer
from .node import Engine
from .observe.stats import snapshot
from .payload import encode_payload
from .ports.log import Row
from .publish.publisher import EventPublisher
from .scope import Scope
from .session import Session, Sources

if TYPE_CHECKING:
    from .config import BusConfig
    from .mesh.link import Link
    from .mesh.node_registry import Node
    from .observe.tracing import Sending
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


class Bus(Engine):
    """An open bus. All of its methods belong to the event loop that entered it."""

    def __init__(self, config: BusConfig, session: Any = None) -> None:
        super().__init__(config, session)
        self._sources = Sources()

    # Publishing.

    async def publisher(self, key: str) -> EventPublisher:
        """A publisher for one concrete key; it has an identity of its own."""
        self._check_open("make a publisher")
        return EventPublisher(self, key)

    def nodes(self) -> list[Node]:
        """The nodes that this one knows of, itself first: who they are, what they publish and want, when last seen.

        Those that left, or fell silent, are kept for an hour with `present` false. Alone, it is the only one.
        """
        self._check_open("look at nodes")
        return self.network.registry.nodes() if self.network is not None else []

    async def put(self, *events: Event) -> Sequence[int]:
        """Store events that have an identity already: a retry, or events from elsewhere.

        An event whose identity is stored keeps its first offset; nothing is stored twice.
        Without a log they are delivered only. Cancelled, they may or may not be stored.
        """
        self._check_open("put events")
        if self.tracing is None or not events:
            return await self._put(events, None)
        with self.tracing.putting(events) as span:
            return await self._put(events, span)

    async def _put(self, events: Sequence[Event], span: Sending | None) -> Sequence[int]:
        rows: list[Row] = []
        for event in events:
            payload, _ = encode_payload(event.payload, self.payload_bytes_max)
            headers = encode_headers(event.headers if span is None else span.onto(event.headers), None, None)
            self.check_key(event.key)
            if self.checks is not None:
                self.checks.hold(event.key, payload)
            rows.append((event.publisher_id, event.sequence, event.published_at, event.key, payload, headers))
        if not rows:
            return []
        if self.commits is not None:
            return await self.commits.add_many(rows)
        for row in rows:
            if self.deliver_unlogged((row,)):
                await asyncio.sleep(0)
        return [0] * len(rows)

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
        return Session(self, session_id, self._sources)

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
        whose position is kept; it resumes after its last acknowledged event. `overflow`: what happens
        when `queue_events` wait: "drop_oldest" (the default), "drop_newest", "block" or "spill" (the
        default with a durable name). `schema`: payloads must decode to this type.

            async with bus.subscribe("shop/*/created", "audit/**") as sub:
                async for event in sub: ...
        """
        self._check_open("subscribe")
        keys = KeySet(key_exprs)
        policy = check_options(self, durable, queue_events, overflow)
        if start != "new" and self.log is None:
            raise LogMissing("a start in the past")
        if isinstance(start, bool) or not (start in ("new", "beginning") or isinstance(start, (int, datetime))):
            raise ConfigInvalid("start", f"{start!r} is none of 'new', 'beginning', an offset, a datetime")
        return EventSubscriber(
            self,
            keys,
            start=start,
            durable=durable,
            queue_events=queue_events,
            overflow=policy,
            schema=schema,
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
                subscription = self.subscribe(*key_exprs, **options)
                run, context = (handler, None) if self.tracing is None else self.tracing.service(handler, subscription)
                serving = serve(subscription, run, self.count, retries)
                service = asyncio.get_running_loop().create_task(serving, context=context)
                self._services.add(service)
                service.add_done_callback(self._service_ended)

            begin() if self.is_open else self._handlers.append(begin)
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

        Raises `NobodyAnswers` (nobody serves it now), `RequestTimeout` (it may have been handled), or
        `HandlerFailed` (the handler raised). Cancelled, the handler is cancelled too.
        """
        self._check_open("ask")
        if self._requests is None:
            raise NobodyAnswers(key)
        if self.tracing is None:
            return await self._requests.ask(key, payload, timeout, headers, correlation_id)
        with self.tracing.sending("request", check_key(key), headers, correlation_id) as span:
            return await self._requests.ask(key, payload, timeout, span.headers, correlation_id)

    def serve(self, key: str) -> Callable[[A], A]:
        """Answer questions for a key; what the handler returns is the reply, what it raises goes to the asker.

        Raises `FabricLacks` (or `start` does) where no transport in use carries questions: raw ones, wire="dynamo".

        @bus.serve("prices/quote")
        async def quote(question): return {"price": 12}
        """

        def register(handler: A) -> A:
            def begin() -> None:
                if self._requests is None:
                    raise ConfigInvalid("read_only", "a bus that is read-only serves nothing")
                self._requests.serve(key, handler if self.tracing is None else self.tracing.handler(handler))

            check_key(key)
            begin() if self.is_open else self._handlers.append(begin)
            return handler

        return register

    def span(self, event: Event, operation: str = "process") -> AbstractContextManager[Any]:
        """A span for what a reader does with an event; handlers of `on` and `serve` have theirs already.

            async for event in sub:
                with bus.span(event): ...

        Spans made and events published in the block are of the event's trace. An error that leaves it is
        recorded. It gives OpenTelemetry's span, or None where this bus does not trace.
        """
        return nullcontext() if self.tracing is None else self.tracing.handling(event, operation)

    async def switch_transport(self, url: str, *, overlap_s: float = 2.0) -> None:
        """Move to another transport without losing or repeating an event.

        The new one is heard first, both carry events for `overlap_s`, then the old ones send what they have
        left and close. With a log, what other nodes miss in between they ask for. Cancelled, both stay in use.
        """
        self._check_open("switch the transport")
        if self.network is None:
            raise ConfigInvalid("transport", "a bus that is read-only has none")
        async with self._switching:
            old = list(self.network.links)
            await self.link(url)
            await self._check_serving(self.network.links[len(old) :])
            await asyncio.sleep(overlap_s if old else 0)
            for link in old:
                await self.network.remove(link, self.config.close_timeout_s / 2)

    async def _check_serving(self, new: Sequence[Link]) -> None:
        """Refuse to move to what cannot carry the questions that are answered here; the old ones stay in use."""
        assert self.network is not None
        try:
            if self.network.answers.serves:
                self.network.check_answering(new)
        except FabricLacks:
            for link in new:
                await self.network.remove(link, self.config.close_timeout_s / 2)
            raise

    async def receive_on(self, *transports: str) -> None:
        """Of several transports, receive on these only, by name or URL; on all, if none is given.

        The flag of a migration: publishing goes on over all of them, and it can be moved back at any time.
        """
        self._check_open("choose where to receive")
        if self.network is None:
            raise ConfigInvalid("transport", "a bus that is read-only has none")
        await self.network.receive_on(transports)

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
        self._check_open("replay")
        self.need_log("replay")
        for name, bound in (("after", after), ("until", until)):
            if isinstance(bound, bool) or not isinstance(bound, (int, datetime, type(None))):
                raise ConfigInvalid(name, f"{bound!r} is neither an offset nor a datetime")
            if isinstance(bound, int) and bound < 0:
                raise ConfigInvalid(name, "offsets are counted from 1")
        skip = self.config.skip_corrupt if skip_corrupt is None else skip_corrupt
        return Replay(self, KeySet(key_exprs or ("**",)), after, until, skip)

    def cache(
        self, *, capacity: int = 10_000, ttl: float | None = None, tti: float | None = None, name: str | None = None
    ) -> Cache:
        """A cache whose entries fall when events say so; it ends with the bus.

        Of `capacity` entries those stay that are used most. `ttl`: seconds that an entry lives, `tti`: seconds that it
        lives unused. `name`: by which `stats()` tells of it.

            todos = bus.cache().invalidate_on("events/Todo/{id}", entry="todo/{id}")
            todo = await todos.load("todo/7", read_todo, 7)
        """
        cache: Cache = self._add_cache(name, "cache", (capacity, ttl, tti))
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
            return self._add_cache(name, default, (capacity, ttl, tti), (function, key, invalidate_on)).function

        return register

    async def head(self) -> int:
        """The offset of the last stored event; 0 for an empty log."""
        self._check_open("read the head")
        return await self.run(self.need_log("head()").head)

    def stats(self) -> dict[str, Any]:
        """What was counted and measured so far: the figures that `zbus.metrics` shows to Prometheus. Any thread.

        Counters by name (`published`, `delivered`, `dropped_queue_full`, `gaps`, …: those that are 0 may be missing),
        and groups: `queues`, `latency`, `log`, `cursors` (how many events each durable name is behind; those read by
        other processes as of the last call), `links` and `caches`.
        """
        found = snapshot(self)
        if self.log is not None and self._executor is not None and (self._listing is None or self._listing.done()):
            with suppress(RuntimeError):  # the executor was shut down
                self._listing = self._executor.submit(self._list_cursors)
        if self._caches:
            found["caches"] = {name: cache.stats() for name, cache in list(self._caches.items())}
        return found

    @property
    def zenoh(self) -> Any:
        """The Zenoh session of this bus, for code that speaks Zenoh itself."""
        self._check_open("use its Zenoh session")
        assert self.network is not None
        fabrics = [*self.network.embedded, *(link.fabric for link in self.network.links)]
        return next((fabric.session for fabric in fabrics if hasattr(fabric, "session")), None)

    def _service_ended(self, service: asyncio.Task[None]) -> None:
        self._services.discard(service)
        if not service.cancelled() and (error := service.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a handler of @bus.on stopped: its subscription failed", "exception": error}
            )

    def _add_cache(self, name: str | None, default: str, *options: Any) -> Any:
        from .plugins import open_cache

        if self._closing is not None:
            raise BusClosed("make a cache")
        if name in self._caches:
            raise ConfigInvalid("name", f"this bus has a cache {name!r} already")
        numbered = (default if number == 1 else f"{default}-{number}" for number in count(1))
        name = name or next(each for each in numbered if each not in self._caches)
        cache = self._caches[name] = open_cache(self, name, *options)
        cache.begin() if self.is_open else self._handlers.append(cache.begin)
        return cache
