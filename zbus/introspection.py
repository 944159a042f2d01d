"""What can be read out of a running bus: its readers, its cursors, the leases of its transports, what passes through.

For programs that show a bus to people (`zbus serve`, `zbus top`). Nothing here changes a bus, and nothing is worked
out before somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from .deliver.dispatcher import Watcher
from .deliver.log_reader import LogReader
from .deliver.subscriber import EventSubscriber
from .node import Node

CURSORS_MAX = 100  # the furthest behind first


class OpenSubscription(NamedTuple):
    """A subscription that is open on this bus."""

    key_exprs: tuple[str, ...]
    durable: str | None
    overflow: str
    live: bool  # events come as they are published, rather than from the log
    queued: int  # events that wait in memory
    dropped: int
    lag: int  # events before it: those that wait or, where it reads from the log, all that follow its position


class CursorPosition(NamedTuple):
    """A durable name and how far it is."""

    name: str
    offset: int
    lag: int
    keys: tuple[str, ...]
    updated_at_ns: int
    owner: str | None  # who holds its lease


class HasNode(Protocol):
    """A bus: it holds a node."""

    _node: Node


def of(bus: HasNode) -> Introspection:
    """Return what can be read from a bus.

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
        """Every stored event up to this offset was delivered here."""
        return self._node.dispatcher.delivered

    @property
    def published_keys(self) -> Collection[str]:
        """The keys that are published to on this node; the first ones, if there are many."""
        return self._node.entry.published_keys

    @property
    def reader(self) -> LogReader:
        """The log, and the threads that read it."""
        return self._node.reader

    def readers(self) -> list[OpenSubscription]:
        """The open subscriptions, furthest behind first."""
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
        return sorted(found, key=lambda reader: (-reader.lag, reader.key_exprs, reader.durable or ""))

    async def positions(self) -> list[CursorPosition]:
        """Every durable subscription by name, with the newest position of those that are read here."""
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
        """The leases in the discovery registries of the transports; only ZMQ's file registry has some."""
        found: list[dict[str, Any]] = []
        for link in self._node.network.links if self._node.network is not None else ():
            listing: Callable[[], Sequence[dict[str, Any]]] | None = getattr(link.fabric, "leases", None)
            if listing is not None:
                found += [{"transport": link.label, **lease} for lease in await self._node.run(listing)]
        return found

    def watch(self, seen: Watcher) -> Callable[[], None]:
        """Call `seen` with each batch that is stored here, or published without a log. Returns what ends that.

        It gets the rows and the size of their payloads on the loop, before the next event: it must only take note.
        """
        dispatcher = self._node.dispatcher
        dispatcher.watchers = (*dispatcher.watchers, seen)

        def stop() -> None:
            dispatcher.watchers = tuple(each for each in dispatcher.watchers if each is not seen)

        return stop


def snapshot(node: Node) -> dict[str, Any]:
    """Return everything that `bus.stats()` contains. Any thread. Reads memory and file sizes, never the log."""
    dispatcher, network, subscriptions = node.dispatcher, node.network, _subscriptions(node)
    queued = [each.queued for each in subscriptions]
    found: dict[str, Any] = {
        **node.stats.counts(),
        "published": node.published_events,
        "delivered": dispatcher.deliveries,
        "backpressure": node.backpressure.blocked_count,
        "subscribers": len(subscriptions),
        "queues": {"events": sum(queued), "events_max": max(queued, default=0)},
        "readers_behind": sum(not each.is_live for each in subscriptions),
    }
    if node.config.latency_metrics:
        found["latency"] = {
            "commit": node.stats.commit.snapshot(),
            "end_to_end": node.stats.end_to_end.snapshot(),
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
    """Those that are open now. Any thread."""
    return [each.subscriber for each in tuple(node.dispatcher.subscriptions)]


def _cursors(node: Node, subscriptions: Sequence[EventSubscriber]) -> dict[str, int]:
    """How many events each durable subscription is behind; for those read here, as of now."""
    at = {cursor.name: cursor.offset for cursor in node.cursors_known}
    for each in subscriptions:
        if each.durable is not None and (acknowledged := each.acknowledged) is not None:
            at[each.durable] = acknowledged
    lags = {name: _events_after(node, offset) for name, offset in at.items()}
    return dict(sorted(lags.items(), key=lambda item: (-item[1], item[0]))[:CURSORS_MAX])


def _events_after(node: Node, offset: int) -> int:
    """How many events were delivered here after an offset; the most that it can be if the log cannot tell."""
    return node.log.count(offset, node.dispatcher.delivered) if node.log is not None else 0
