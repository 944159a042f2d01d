"""zbus for code that has no event loop: the same bus, called from ordinary threads.

    with zbus.blocking.open("app.db") as bus:
        offset = bus.publisher("shop/orders/created").publish({"id": 1})
        for event in bus.replay("shop/**"): ...

One event loop runs in a background thread; each call hands it a coroutine and waits for the end. Events
cross over in batches, because a round trip between threads costs more than an event. An event that has
crossed waits in its stream until it is asked for, so a wait that Ctrl-C or a timeout ends loses nothing.
"""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from . import bus as _async
from .deliver.subscriber import EventSubscriber
from .errors import BusClosed
from .event import Event
from .ports.log import Schema
from .publish.publisher import EventPublisher
from .schema.registry import Schemas as _AsyncSchemas
from .session import Session as _AsyncSession
from .util.loop_thread import LoopEnded, LoopThread

if TYPE_CHECKING:
    from .config import BusConfig
    from .mesh.node_registry import NodeInfo

__all__ = ["Bus", "Publisher", "Schemas", "Session", "Subscription", "open"]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
BATCH_EVENTS_MAX = 512
CLOSE_GRACE_S = 2.0


def _waiting(method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The same method with the same arguments, and it waits. So nothing of the async client is written twice."""

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
    """A bus to be used as `with zbus.blocking.open("app.db") as bus: …`; arguments as for `zbus.open`."""
    return Bus(_async.open(log, config=config, session=session, **settings))


class Bus:
    """A bus, and the thread that runs its event loop. Any thread may call it."""

    def __init__(self, bus: _async.Bus) -> None:
        self._inner = bus
        self._thread: LoopThread | None = None
        self._opened: Future[None] = Future()
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()

    put = _waiting(_async.Bus.put)
    head = _waiting(_async.Bus.head)
    request = _waiting(_async.Bus.request)
    switch_transport = _waiting(_async.Bus.switch_transport)
    receive_on = _waiting(_async.Bus.receive_on)

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
        """Flush and close everything, in `close_timeout_s` and two seconds at most; safe to call twice."""
        if self._thread is not None:
            self._thread.stop(self._inner.config.close_timeout_s + CLOSE_GRACE_S)

    def publisher(self, key: str) -> Publisher:
        """A publisher for one concrete key; it has an identity of its own."""
        return Publisher(self, self._call("make a publisher", self._inner.publisher(key)))

    def subscribe(self, *key_exprs: str, **options: Any) -> Subscription:
        """A stream of the events that any expression matches; options as for `zbus.Bus.subscribe`."""
        source = self._call("subscribe", self._subscribe(key_exprs, options))
        subscription = Subscription(self, source)
        self._subscriptions.add(subscription)
        return subscription

    def replay(self, *key_exprs: str, **options: Any) -> Iterator[Event]:
        """Stored events, from the log alone; options as for `zbus.Bus.replay`."""
        return _Stream(self, self._inner.replay(*key_exprs, **options))

    def session(self, session_id: str) -> Session:
        """A session: as `zbus.Bus.session`."""
        return Session(self, self._inner.session(session_id))

    @property
    def schemas(self) -> Schemas:
        """What the payloads of some keys must look like."""
        return Schemas(self, self._inner.schemas)

    def span(self, event: Event, operation: str = "process") -> AbstractContextManager[Any]:
        """A span for what this thread does with an event; as `zbus.Bus.span`."""
        return self._inner.span(event, operation)

    def stats(self) -> dict[str, Any]:
        """What was counted and measured so far, as `zbus.Bus.stats` tells it."""
        return self._inner.stats()

    def nodes(self) -> list[NodeInfo]:
        """The nodes that this one knows of, itself first."""

        async def look() -> list[NodeInfo]:
            return self._inner.nodes()

        return self._call("look at nodes", look())

    async def _subscribe(self, key_exprs: Sequence[str], options: dict[str, Any]) -> EventSubscriber:
        return await self._inner.subscribe(*key_exprs, **options).ready()

    async def _live(self) -> None:
        """On the thread, from the opening of the bus to its end."""
        assert self._thread is not None
        try:
            async with self._inner:
                self._opened.set_result(None)
                await self._thread.stopping.wait()
            for subscription in tuple(self._subscriptions):
                await subscription._bring_over()
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    def _call(self, doing: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait; an interrupt of the wait cancels it."""
        if self._thread is None:
            coroutine.close()
            raise BusClosed(doing)
        try:
            return self._thread.run(coroutine)
        except LoopEnded:
            raise BusClosed(doing) from None


class Publisher:
    """Publishes to one key, with an identity of its own: a `zbus.EventPublisher` that waits."""

    def __init__(self, bus: Bus, publisher: EventPublisher) -> None:
        self._inner, self._call = publisher, bus._call
        self.key, self.publisher_id = publisher.key, publisher.publisher_id

    publish = _waiting(EventPublisher.publish)

    def publish_many(self, payloads: Iterable[Any], **options: Any) -> Sequence[int]:
        """As `EventPublisher.publish_many`; `payloads` is first read to its end in this thread, which may block."""
        return self._call("publish", self._inner.publish_many(list(payloads), **options))


class Session:
    """One session of a bus: a `zbus.Session` that waits."""

    def __init__(self, bus: Bus, session: _AsyncSession) -> None:
        self._bus, self._inner, self._call = bus, session, bus._call
        self.id, self.key, self.token = session.id, session.key, session.token

    publish = _waiting(_AsyncSession.publish)

    def publish_many(self, key: str, payloads: Iterable[Any], **options: Any) -> Sequence[tuple[int, int]]:
        """As `zbus.Session.publish_many`; `payloads` is first read to its end in this thread, which may block."""
        return self._call("publish", self._inner.publish_many(key, list(payloads), **options))

    def subscribe(self, *key_exprs: str, **options: Any) -> Subscription:
        """The session's own events, as `zbus.Session.subscribe` tells them."""
        return self._bus.subscribe(*self._inner.expressions(*key_exprs), **options)


class Schemas:
    """The schemas of a bus: `zbus.Bus.schemas`, and it waits."""

    def __init__(self, bus: Bus, schemas: _AsyncSchemas) -> None:
        self._inner, self._call = schemas, bus._call

    register = _waiting(_AsyncSchemas.register)
    remove = _waiting(_AsyncSchemas.remove)
    load = _waiting(_AsyncSchemas.load)

    def list(self) -> Sequence[Schema]:
        """The schemas in force, by expression."""
        return self._inner.list()

    def get(self, expression: str) -> Schema | None:
        """The schema in force for exactly this expression; None where there is none."""
        return self._inner.get(expression)


class _Stream(Iterator[Event]):
    """Events and errors in order, as they crossed over. Batches double, so that the first event is not late."""

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
        while await self._bring_one() and self._has_more():
            pass

    async def _bring_one(self) -> bool:
        try:
            self._ready.append(await anext(self._source))
        except StopAsyncIteration:
            self._ended = True
        except Exception as error:
            self._ready.append(error)  # raised where it belongs: after the events before it
        else:
            return True
        return False

    def _has_more(self) -> bool:
        return len(self._ready) < self._batch_events


class Subscription(_Stream):
    """A stream of events: `with bus.subscribe("shop/**") as sub: for event in sub: …`. One thread at a time reads it.

    What was fetched no longer counts as queued, so a slow reader meets its gap up to one batch later. With a durable
    name nothing is fetched ahead: asking for the next event acknowledges the one before, and nothing else does.
    """

    def __init__(self, bus: Bus, subscriber: EventSubscriber) -> None:
        super().__init__(bus, subscriber)
        self._inner = subscriber

    def __enter__(self) -> Subscription:
        self._call("subscribe", self._inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dropped(self) -> int:
        """How many events were dropped because the queue was full."""
        return self._inner.dropped

    def next(self, timeout: float | None = None) -> Event | None:
        """The next event; None when the subscription or the bus was closed. Raises `TimeoutError` after `timeout` s."""
        if timeout is not None and not self._ready and not self._ended:
            self._call("read", self._fill_within(timeout))
        return next(self, None)

    def ack(self, event: Event) -> None:
        """Acknowledge an event of this durable subscription, and all before it; returns once that is on disk."""
        self._call("acknowledge", event.ack())

    def close(self) -> None:
        """Stop receiving; what is queued can still be read. Stores what a durable name has acknowledged."""
        try:
            self._call("unsubscribe", self._inner.aclose())
        except BusClosed:
            pass  # closing the bus closed it

    async def _fill_within(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await self._fill()

    async def _bring_over(self) -> None:
        """The loop is about to end: what is still queued crosses now. A closed subscription never waits."""
        while not self._ended and self._inner.durable is None:
            await self._bring_one()

    def _has_more(self) -> bool:
        return self._inner.durable is None and self._inner.queued > 0 and super()._has_more()
