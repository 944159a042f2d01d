"""zbus for code that has no event loop: the same bus, called from ordinary threads.

    with zbus.blocking.open("app.db") as bus:
        offset = bus.publisher("shop/orders/created").publish({"id": 1})
        for event in bus.replay("shop/**"): ...

One event loop runs in a background thread; each call passes it a coroutine and waits for the result. Events
are fetched in batches, because a round trip between threads costs more than an event. A fetched event stays
in its stream until it is read, so no event is lost if Ctrl-C or a timeout ends a wait.
"""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

from . import bus as _async
from .deliver.subscriber import EventSubscriber
from .errors import BusClosed
from .event import Event
from .payload import check_many
from .ports.log import Schema
from .publish.publisher import EventPublisher
from .schema.registry import Schemas as _AsyncSchemas
from .session import Session as _AsyncSession
from .util.loop_thread import LoopEnded, LoopThread
from .util.renamed import unknown_attribute

if TYPE_CHECKING:
    from .config import BusConfig
    from .mesh.node_registry import NodeInfo

__all__ = ["Bus", "Publisher", "Schemas", "Session", "Subscription", "open"]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
_INSTEAD = dict.fromkeys(
    ("publish", "publish_many", "emit"), "write: bus.publisher(key).publish(payload)"
) | dict.fromkeys(("on", "cache", "cached", "serve"), "only zbus.open has it: it needs an event loop")
BATCH_EVENTS_MAX = 512
CLOSE_GRACE_S = 2.0


def _blocking(method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a blocking version of an async method with the same arguments."""

    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        waited: T = self._call(f"call {method.__name__}()", method(self._inner, *args, **options))
        return waited

    functools.update_wrapper(call, method)
    return call


def open(  # noqa: A001 - zbus.blocking.open reads best
    log: str | os.PathLike[str] | None = None,
    *,
    config: BusConfig | str | os.PathLike[str] | None = None,
    session: Any = None,
    **settings: Any,
) -> Bus:
    """Return a bus for `with zbus.blocking.open("app.db") as bus: …`. Arguments as for `zbus.open`."""
    return Bus(_async.open(log, config=config, session=session, **settings))


class Bus:
    """A bus, and the thread that runs its event loop. Any thread may call it."""

    def __init__(self, bus: _async.Bus) -> None:
        self._inner = bus
        self._thread: LoopThread | None = None
        self._opened: Future[None] = Future()
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()

    put = _blocking(_async.Bus.put)
    head = _blocking(_async.Bus.head)
    backup = _blocking(_async.Bus.backup)
    request = _blocking(_async.Bus.request)
    switch_transport = _blocking(_async.Bus.switch_transport)
    receive_on = _blocking(_async.Bus.receive_on)

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_attribute("'blocking.Bus' object", name, {}, _INSTEAD)

    def __enter__(self) -> Bus:
        self._opened = Future()
        self._thread = LoopThread("zbus-blocking", self._live)
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush and close the bus within `close_timeout_s` plus two seconds. Safe to call twice."""
        if self._thread is not None:
            self._thread.stop(self._inner.config.close_timeout_s + CLOSE_GRACE_S)

    def publisher(self, key: str) -> Publisher:
        """Return a publisher for one concrete key, with its own identity."""
        return Publisher(self, self._call("make a publisher", self._inner.publisher(key)))

    def subscribe(self, *key_exprs: str, **options: Any) -> Subscription:
        """Subscribe to the events that match any of the expressions. Options as for `zbus.Bus.subscribe`."""
        source = self._call("subscribe", self._subscribe(key_exprs, options))
        subscription = Subscription(self, source)
        self._subscriptions.add(subscription)
        return subscription

    def replay(self, *key_exprs: str, **options: Any) -> Iterator[Event]:
        """Return stored events, only from the log. Options as for `zbus.Bus.replay`."""
        return _Stream(self, self._inner.replay(*key_exprs, **options))

    def session(self, session_id: str) -> Session:
        """Return a session, like `zbus.Bus.session`."""
        return Session(self, self._inner.session(session_id))

    @property
    def schemas(self) -> Schemas:
        """The schemas of this bus."""
        return Schemas(self, self._inner.schemas)

    def span(self, event: Event, operation: str = "process") -> AbstractContextManager[Any]:
        """Start a span for the work of this thread on an event, like `zbus.Bus.span`."""
        return self._inner.span(event, operation)

    @property
    def config(self) -> BusConfig:
        """The settings of this bus."""
        return self._inner.config

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the bus, like `zbus.Bus.stats`."""
        return self._inner.stats()

    def diagnostics(self) -> dict[str, Any]:
        """Return the mode, the log and the transports of this bus, like `zbus.Bus.diagnostics`."""

        async def look() -> dict[str, Any]:
            return self._inner.diagnostics()

        return self._call("look at the state of the bus", look())

    def nodes(self) -> list[NodeInfo]:
        """Return the nodes that this node knows, itself first."""

        async def look() -> list[NodeInfo]:
            return self._inner.nodes()

        return self._call("look at nodes", look())

    async def _subscribe(self, key_exprs: Sequence[str], options: dict[str, Any]) -> EventSubscriber:
        return await self._inner.subscribe(*key_exprs, **options).ready()

    async def _live(self) -> None:
        """Keep the bus open until the thread is stopped. Runs on the background thread."""
        assert self._thread is not None
        try:
            async with self._inner:
                self._opened.set_result(None)
                await self._thread.stopping.wait()
            for subscription in tuple(self._subscriptions):
                await subscription._fetch_queued()
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    def _call(self, doing: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it. An interrupt of the wait cancels it."""
        if self._thread is None:
            coroutine.close()
            raise BusClosed(doing)
        try:
            return self._thread.run(coroutine)
        except LoopEnded:
            raise BusClosed(doing) from None


class Publisher:
    """Publishes to one key, with its own identity: a blocking `zbus.EventPublisher`."""

    def __init__(self, bus: Bus, publisher: EventPublisher) -> None:
        self._inner, self._call = publisher, bus._call
        self.key, self.publisher_id = publisher.key, publisher.publisher_id

    publish = _blocking(EventPublisher.publish)

    def publish_many(self, payloads: Iterable[Any], **options: Any) -> Sequence[int]:
        """Publish many events, like `EventPublisher.publish_many`. First reads all `payloads` in this thread."""
        check_many(payloads)
        return self._call("publish", self._inner.publish_many(list(payloads), **options))


class Session:
    """One session of a bus: a blocking `zbus.Session`."""

    def __init__(self, bus: Bus, session: _AsyncSession) -> None:
        self._bus, self._inner, self._call = bus, session, bus._call
        self.id, self.key, self.token = session.id, session.key, session.token

    publish = _blocking(_AsyncSession.publish)

    def publish_many(self, key: str, payloads: Iterable[Any], **options: Any) -> Sequence[tuple[int, int]]:
        """Publish many payloads, like `zbus.Session.publish_many`. First reads all `payloads` in this thread."""
        check_many(payloads)
        return self._call("publish", self._inner.publish_many(key, list(payloads), **options))

    def subscribe(self, *key_exprs: str, **options: Any) -> Subscription:
        """Subscribe to the session's own events, like `zbus.Session.subscribe`."""
        return self._bus.subscribe(*self._inner.expressions(*key_exprs), **options)


class Schemas:
    """The schemas of a bus: a blocking `zbus.Bus.schemas`."""

    def __init__(self, bus: Bus, schemas: _AsyncSchemas) -> None:
        self._inner, self._call = schemas, bus._call

    register = _blocking(_AsyncSchemas.register)
    remove = _blocking(_AsyncSchemas.remove)
    load = _blocking(_AsyncSchemas.load)

    def list(self) -> Sequence[Schema]:
        """Return the active schemas, by expression."""
        return self._inner.list()

    def get(self, expression: str) -> Schema | None:
        """Return the active schema registered for exactly this expression, or None."""
        return self._inner.get(expression)


class _Stream(Iterator[Event]):
    """Fetched events and errors in order. The size of batches doubles, so that the first event is not delayed."""

    def __init__(self, bus: Bus, source: AsyncIterator[Event]) -> None:
        self._call, self._source = bus._call, source
        self._ready: deque[Event | Exception] = deque()
        self._ended = False
        self._batch_events = 1

    def __next__(self) -> Event:
        if not self._ready and not self._ended:
            self._call("read", self._fill())
        if not self._ready:
            raise StopIteration
        item = self._ready.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    async def _fill(self) -> None:
        self._batch_events = min(BATCH_EVENTS_MAX, self._batch_events * 2)
        while await self._fetch_one() and self._has_more():
            pass

    async def _fetch_one(self) -> bool:
        try:
            self._ready.append(await anext(self._source))
        except StopAsyncIteration:
            self._ended = True
        except Exception as error:
            self._ready.append(error)  # raised after the events before it
        else:
            return True
        return False

    def _has_more(self) -> bool:
        return len(self._ready) < self._batch_events


class _Done:
    """The result of a call that has ended. Awaiting it returns the result."""

    def __await__(self) -> Generator[None]:
        yield from ()


class Subscription(_Stream):
    """A stream of events: `with bus.subscribe("shop/**") as sub: for event in sub: …`, for one thread at a time.

    Fetched events no longer count as queued, so a slow subscriber sees its gap up to one batch later. A durable
    subscription fetches no events ahead: only reading the next event acknowledges the one before.
    """

    def __init__(self, bus: Bus, subscriber: EventSubscriber) -> None:
        super().__init__(bus, subscriber)
        self._inner = subscriber
        handle = subscriber._handle
        if (acknowledge := handle.acknowledge) is not None:
            handle.acknowledge = lambda offset: self._acknowledge(acknowledge(offset))  # `event.ack()` waits for it

    def __enter__(self) -> Subscription:
        self._call("subscribe", self._inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dropped(self) -> int:
        """The number of events that were dropped because the queue was full."""
        return self._inner.dropped

    def next(self, timeout: float | None = None) -> Event | None:
        """Return the next event, or None if the subscription or the bus was closed. Raises `TimeoutError`."""
        if timeout is not None and not self._ready and not self._ended:
            self._call("read", self._fill_within(timeout))
        return next(self, None)

    def ack(self, event: Event) -> None:
        """Acknowledge an event of this durable subscription and all before it. Returns once that is on disk."""
        event.ack()

    def _acknowledge(self, acknowledging: Awaitable[None]) -> Awaitable[None]:
        async def wait() -> None:
            await acknowledging

        self._call("acknowledge", wait())
        return _Done()

    def close(self) -> None:
        """Stop receiving. Queued events can still be read. Stores the cursor of a durable subscription."""
        try:
            self._call("unsubscribe", self._inner.aclose())
        except BusClosed:
            pass  # closing the bus has closed the subscription

    async def _fill_within(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await self._fill()

    async def _fetch_queued(self) -> None:
        """Fetch all queued events before the loop ends. A closed subscription never waits."""
        while not self._ended and self._inner.durable is None:
            await self._fetch_one()

    def _has_more(self) -> bool:
        return self._inner.durable is None and self._inner.queued > 0 and super()._has_more()
