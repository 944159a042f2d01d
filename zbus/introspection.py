"""Introspection of a running bus: subscriptions, cursors, leases of its transports, and a tap on its events.

For programs that display a bus (`zbus serve`, `zbus top`). Nothing here changes a bus, and everything is computed when
it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from .deliver.dispatcher import Watcher
from .deliver.log_reader import LogReader
from .deliver.subscriber import EventSubscriber
from .node import Node

CURSORS_MAX = 100  # those with the largest lag first


class OpenSubscription(NamedTuple):
    """An open subscription of this bus."""

    key_exprs: tuple[str, ...]
    durable: str | None
    overflow: str
    live: bool  # receives events as they are published; otherwise it reads the log
    queued: int  # events in memory
    dropped: int
    lag: int  # events that it has not received: those in memory or, if it reads the log, all after its position


class CursorPosition(NamedTuple):
    """The cursor of a durable subscription."""

    name: str
    offset: int
    lag: int
    keys: tuple[str, ...]
    updated_at_ns: int
    owner: str | None  # the process that holds its lease


class HasNode(Protocol):
    """A bus, which has a node."""

    _node: Node


def of(bus: HasNode) -> Introspection:
    """Return the introspection of a bus.

    head = introspection.of(bus).head
    """
    return Introspection(bus._node)


class Introspection:
    """Reads the state of a bus. Belongs to the event loop of the bus."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def is_open(self) -> bool:
        """Whether the bus is open."""
        return self._node.is_open

    @property
    def head(self) -> int:
        """The offset up to which every stored event was delivered here."""
        return self._node.dispatcher.delivered

    @property
    def published_keys(self) -> Collection[str]:
        """The keys that this node published on; only the first ones if there are many."""
        return self._node.entry.published_keys

    @property
    def reader(self) -> LogReader:
        """The log and the threads that read it."""
        return self._node.reader

    def subscriptions(self) -> list[OpenSubscription]:
        """Return the open subscriptions, those with the largest lag first."""
        found = []
        for each in _subscriptions(self._node):
            acknowledged = each.acknowledged
            if acknowledged is not None:
                lag = _events_after(self._node, acknowledged)
            else:
                lag = each.queued if each.is_live else _events_after(self._node, each.position)
            found.append(
                OpenSubscription(
                    each.key_exprs, each.durable, each.overflow, each.is_live, each.queued, each.dropped, lag
                )
            )
        return sorted(found, key=lambda each: (-each.lag, each.key_exprs, each.durable or ""))

    async def positions(self) -> list[CursorPosition]:
        """Return every cursor, with the newest position for subscriptions that are open here."""
        node = self._node
        if node.log is None:
            return []
        stored = await node.run(node.log.cursors.list)
        here = {each.durable: each.acknowledged for each in _subscriptions(node) if each.durable is not None}
        found = []
        for cursor in stored:
            offset = max(cursor.offset, here.get(cursor.name) or 0)
            lag = _events_after(node, offset)
            found.append(CursorPosition(cursor.name, offset, lag, cursor.keys, cursor.updated_at_ns, cursor.owner))
        return found

    async def leases(self) -> list[dict[str, Any]]:
        """Return the leases in the discovery registries of the transports. Only ZMQ's file registry has leases."""
        found: list[dict[str, Any]] = []
        for link in self._node.network.links if self._node.network is not None else ():
            listing: Callable[[], Sequence[dict[str, Any]]] | None = getattr(link.fabric, "leases", None)
            if listing is not None:
                found += [{"transport": link.label, **lease} for lease in await self._node.run(listing)]
        return found

    def watch(self, seen: Watcher) -> Callable[[], None]:
        """Call `seen` with each batch that is stored or, without a log, published here. Return a function that ends it.

        `seen` gets the rows and the size of their payloads. It runs on the event loop and delays the next event, so it
        must only take note of them.
        """
        dispatcher = self._node.dispatcher
        dispatcher.watchers = (*dispatcher.watchers, seen)

        def stop() -> None:
            dispatcher.watchers = tuple(each for each in dispatcher.watchers if each is not seen)

        return stop


def snapshot(node: Node) -> dict[str, Any]:
    """Return the content of `bus.stats()`. Any thread may call it. It reads memory and file sizes, never the log."""
    dispatcher, network, subscriptions = node.dispatcher, node.network, _subscriptions(node)
    queued = [each.queued for each in subscriptions]
    found: dict[str, Any] = {
        **node.stats.counts(),
        "published": node.published_events,
        "delivered": dispatcher.deliveries,
        "publish_blocked": node.backpressure.blocked_count,
        "subscriptions": len(subscriptions),
        "queues": {"events": sum(queued), "largest_events": max(queued, default=0)},
        "subscriptions_catching_up": sum(not each.is_live for each in subscriptions),
    }
    if node.config.latency_metrics:
        found["latency"] = {
            "commit": node.stats.commit.snapshot(),
            "delivery": node.stats.delivery.snapshot(),
        }
    if node.log is not None:
        found["log"] = {
            "head": dispatcher.delivered,
            "bytes": node.log.size_bytes(),
            "promise": node.log.promise._asdict(),
        }
        found["cursors"] = _cursors(node, subscriptions)
    if network is not None and network.links:
        found["links"] = {
            link.label: {
                "fabric": link.fabric.name,
                "sent": link.send_queue.sent_events,
                "received": network.inbox.received.get(link.label, 0),
                "waiting": link.send_queue.waiting,
            }
            for link in network.links
        }
        found["nodes"] = sum(each.alive for each in network.registry.nodes())
    node.list_cursors()
    if node.caches:
        found["caches"] = {name: cache.stats() for name, cache in list(node.caches.items())}
    return found


def _subscriptions(node: Node) -> list[EventSubscriber]:
    """Return the open subscriptions. Any thread may call it."""
    return [each.subscriber for each in tuple(node.dispatcher.subscriptions)]


def _cursors(node: Node, subscriptions: Sequence[EventSubscriber]) -> dict[str, int]:
    """Return the lag of each durable subscription, with the newest position for those that are open here."""
    at = {cursor.name: cursor.offset for cursor in node.cursors_known}
    for each in subscriptions:
        if each.durable is not None and (acknowledged := each.acknowledged) is not None:
            at[each.durable] = acknowledged
    lags = {name: _events_after(node, offset) for name, offset in at.items()}
    return dict(sorted(lags.items(), key=lambda item: (-item[1], item[0]))[:CURSORS_MAX])


def _events_after(node: Node, offset: int) -> int:
    """Return the number of events delivered here after an offset, or an upper bound if the log cannot count them."""
    return node.log.count(offset, node.dispatcher.delivered) if node.log is not None else 0
