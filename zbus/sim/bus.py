"""The bus of a simulated node: the production bus, whose publishers and subscriptions report to the ledger.

Only the API is observed. Everything below it is the code that runs in production.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import ref

from zbus.bus import Bus
from zbus.deliver.overflow import POLICIES
from zbus.deliver.subscriber import EventSubscriber
from zbus.event import DeliveryHandle, Event, Offset
from zbus.node import Node, Ports
from zbus.publish.entry import Entry
from zbus.publish.publisher import EventPublisher

from .errors import ProcessKilled
from .ledger import Ledger, Subscription
from .machine.loop import Process
from .machine.runtime import SimRuntime

if TYPE_CHECKING:
    from zbus.config import BusConfig

T = TypeVar("T")


class Home(Protocol):
    """The node of a bus."""

    name: str

    async def call(self, make: Callable[[], Awaitable[T]], process: Process | None = None) -> T:
        """Run a coroutine in a process of the node."""


class SimBus(Bus):
    """A bus on a simulated log and network. Use it as any other.

    Calls from outside of its process, such as from a scenario, run in its process. They raise `ProcessKilled` if it is
    killed.
    """

    def __init__(self, config: BusConfig, runtime: SimRuntime, ports: Ports, ledger: Ledger, home: Home) -> None:
        self._ledger, self._home, self._process = ledger, home, runtime.process
        self._call = partial(home.call, process=runtime.process)
        self._node = Node(config, runtime=runtime, ports=ports, make_subscriber=self._observed)

    async def publisher(self, key: str) -> EventPublisher:
        """Return a publisher for one concrete key."""
        self._node.check_open("make a publisher")
        return ObservedPublisher(self._node.entry, key, self._ledger, self._home.name, self._call)

    async def put(self, *events: Event) -> Sequence[Offset]:
        """Publish events that already have an identity."""
        begun, put = self._ledger.now(), super().put

        async def acknowledged() -> Sequence[Offset]:
            offsets = await put(*events)
            for event in events:
                self._ledger.acknowledged(self._home.name, event.identity, event.key, begun)
            return offsets

        return await self._call(acknowledged)

    async def request(self, key: str, payload: Any = b"", **options: Any) -> Event:
        """Send a request, and return the reply."""
        return await self._call(lambda: super(SimBus, self).request(key, payload, **options))

    async def switch_transport(self, url: str, *, overlap_s: float = 2.0) -> None:
        """Move to another transport."""
        await self._call(lambda: super(SimBus, self).switch_transport(url, overlap_s=overlap_s))

    async def receive_on(self, *transports: str) -> None:
        """Receive only on these transports."""
        await self._call(lambda: super(SimBus, self).receive_on(*transports))

    async def head(self) -> int:
        """Return the offset of the last stored event."""
        return await self._call(super().head)

    def _observed(self, *args: Any, **options: Any) -> EventSubscriber:
        return ObservedSubscriber(self._ledger, self._home, self._process, *args, **options)


class ObservedPublisher(EventPublisher):
    """Reports each publish that returns."""

    __slots__ = ("_call", "_ledger", "_name")

    def __init__(self, entry: Entry, key: str, ledger: Ledger, name: str, call: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(entry, key)
        self._ledger, self._name, self._call = ledger, name, call

    async def publish(
        self, payload: Any, *, headers: Mapping[str, str] | None = None, correlation_id: str | None = None
    ) -> Offset:
        """Publish one event."""
        begun, publish = self._ledger.now(), super().publish

        async def acknowledged() -> Offset:
            offset = await publish(payload, headers=headers, correlation_id=correlation_id)
            # In the process, and so before a subscriber of the same node can read an event that no log has.
            self._ledger.acknowledged(self._name, offset.identity, self.key, begun)
            return offset

        found: Offset = await self._call(acknowledged)
        return found

    async def publish_many(
        self,
        payloads: Iterable[Any],
        *,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
    ) -> Sequence[int]:
        """Publish many events. One call at a time: the ledger takes the sequences in order."""
        begun, publish = self._ledger.now(), super().publish_many

        async def acknowledged() -> Sequence[int]:
            offsets = await publish(payloads, headers=headers, correlation_id=correlation_id)
            for sequence in range(self.sequence - len(offsets), self.sequence):  # before it, the identity may change
                self._ledger.acknowledged(self._name, (self.publisher_id, sequence), self.key, begun)
            return offsets

        found: Sequence[int] = await self._call(acknowledged)
        return found


class ObservedSubscriber(EventSubscriber):
    """Reports each event that it hands over."""

    def __init__(self, ledger: Ledger, home: Home, process: Process, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._call = partial(home.call, process=process)
        self._observed = Subscription(ledger, home.name, process, self)
        if self._durable is not None:
            acknowledge = _observed_acknowledge(self._durable.acknowledge, ref(self._observed))
            self._handle = DeliveryHandle(self.schema, acknowledge)

    async def ready(self) -> EventSubscriber:
        """Wait until the transports know this subscription."""
        await self._call(super().ready)
        if self.durable is None:
            self._observed.ready()
        return self

    async def __aenter__(self) -> EventSubscriber:
        await self._call(super().__aenter__)
        self._observed.ready()
        return self

    async def __anext__(self) -> Event:
        self._observed.asked()
        try:
            event = await self._call(super().__anext__)
        except Exception as error:
            self._observed.failed(error)
            raise
        self._observed.delivered(event)
        return event

    async def next_batch(self, limit: int = 1000) -> list[Event] | None:
        """Return the events that wait now."""
        self._observed.asked()
        events = await self._call(lambda: super(ObservedSubscriber, self).next_batch(limit))
        for event in (events or [])[1:]:  # `__anext__` has reported the first one
            self._observed.delivered(event)
        return events

    async def aclose(self) -> None:
        """Stop receiving."""
        is_first = self._observed.is_open  # another call returns before the position is stored
        self._observed.closed()
        with suppress(ProcessKilled):  # then it is closed
            await self._call(super().aclose)
            if is_first:
                self._observed.released()

    def forget(self) -> None:
        """Drop the events that wait: the world has ended. They lead to everything, invisible to the collector."""
        self._queue.clear()
        self._aside = None
        self._policy = POLICIES["drop_oldest"](self._inlet, self._buffer, self._host)


def _observed_acknowledge(
    acknowledge: Callable[[int], Awaitable[None]], observed: ref[Subscription]
) -> Callable[[int], Awaitable[None]]:
    """Return what `event.ack()` calls. An event leads to it, so it must not lead to the subscription."""

    async def report(offset: int) -> None:
        if (subscription := observed()) is not None:
            subscription.acknowledged(offset)
        await acknowledge(offset)

    return report
