"""What can be read out of a running bus: its readers, its cursors, the leases of its transports, what passes through.

For programs that show a bus to people (`zbus serve`, `zbus top`). Nothing here changes a bus, and nothing is worked
out before somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .deliver.dispatcher import Watcher

if TYPE_CHECKING:
    from .bus import Bus


class Reader(NamedTuple):
    """A subscription that is open on this bus."""

    key_exprs: tuple[str, ...]
    durable: str | None
    overflow: str
    live: bool  # events come as they are published, rather than from the log
    queued: int  # events that wait in memory
    dropped: int
    lag: int  # events before it: those that wait or, where it reads from the log, all that follow its position


class Position(NamedTuple):
    """A durable name and how far it is."""

    name: str
    offset: int
    lag: int
    keys: tuple[str, ...]
    updated_at_ns: int
    owner_pid: int | None


def readers(bus: Bus) -> list[Reader]:
    """The subscriptions that are open, furthest behind first. On the loop."""
    head = bus.delivery.delivered
    found = []
    for each in bus.subscriptions:
        acknowledged = each.acknowledged
        if acknowledged is not None:
            lag = max(0, head - acknowledged)
        else:
            lag = each.queued if each.is_live else max(0, head - each.position)
        found.append(Reader(each.key_exprs, each.durable, each.overflow, each.is_live, each.queued, each.dropped, lag))
    return sorted(found, key=lambda reader: (-reader.lag, reader.key_exprs, reader.durable or ""))


async def positions(bus: Bus) -> list[Position]:
    """Every durable name, by name; of those read here, as of now. None where there is no log."""
    if bus.log is None:
        return []
    stored = await bus.run(bus.log.cursors.list)
    here = {each.durable: each.acknowledged for each in bus.subscriptions if each.durable is not None}
    found = []
    for cursor in stored:
        offset = max(cursor.offset, here.get(cursor.name) or 0)
        lag = max(0, bus.delivery.delivered - offset)
        found.append(Position(cursor.name, offset, lag, cursor.keys, cursor.updated_at_ns, cursor.owner_pid))
    return found


async def leases(bus: Bus) -> list[dict[str, Any]]:
    """The leases by which transports know who is there: ZMQ's file registry has some; empty where there are none."""
    found: list[dict[str, Any]] = []
    for link in bus.network.links if bus.network is not None else ():
        listing: Callable[[], Sequence[dict[str, Any]]] | None = getattr(link.fabric, "leases", None)
        if listing is not None:
            found += [{"transport": link.label, **lease} for lease in await bus.run(listing)]
    return found


def watch(bus: Bus, seen: Watcher) -> Callable[[], None]:
    """Let `seen` have each burst that is stored here, or published where there is no log; returns what ends that.

    It gets the rows and the size of their payloads, on the loop, in the way of every event: it only takes note.
    """
    delivery = bus.delivery
    delivery.watchers = (*delivery.watchers, seen)

    def stop() -> None:
        delivery.watchers = tuple(each for each in delivery.watchers if each is not seen)

    return stop
