"""The registry: which nodes are there, what they publish and want, and when each was last heard.

Every node tells of itself, at its start, whenever a new one is heard, and a few times within its time to live.
Who is silent for longer is gone; who comes back, after a restart or a pause, has rejoined. There is no registry to
run: each node has its own view, of those that it can hear.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from zbus.observe.records import NODE_JOINED, NODE_LEFT, NODE_REJOINED, record
from zbus.util.renamed import unknown_attribute
from zbus.util.runtime import Runtime
from zbus.version import __version__
from zbus.wire.announcement import NAMES_MAX, Announcement, decode_announcement, encode_announcement, node_key

from .host import Announces

if TYPE_CHECKING:
    from zbus.config import BusConfig

TELLS_A_TTL = 3  # how often a node tells of itself within its time to live
SOON_S = 0.05  # after a new one was heard
NODES_MAX = 10_000
GONE_KEPT_S = 3600.0  # how long one that left is remembered, so that its return is known as one


_RENAMED = {"node": "id", "here": "is_self", "present": "alive", "more": "truncated"}


class NodeInfo(NamedTuple):
    """A node of the mesh, this one included."""

    id: str  # its origin in hex: stays the same as long as its log does
    name: str
    buses: tuple[str, ...]
    host: str
    pid: int
    version: str
    started_at: int
    last_seen: int  # Unix ns, by our clock
    is_self: bool  # it is this bus
    alive: bool
    has_log: bool
    transport: str  # over which it was heard
    trust: str  # how that transport makes sure who is at the far end
    endpoints: tuple[str, ...]
    publishes: tuple[str, ...]
    subscribes: tuple[str, ...]
    serves: tuple[str, ...]
    truncated: int  # number of names left out of the four lists
    metadata: Mapping[str, str]

    @property
    def topics(self) -> tuple[str, ...]:
        """What it publishes and what it wants."""
        return (*self.publishes, *self.subscribes)


def _unknown(self: NodeInfo, name: str) -> Any:
    raise unknown_attribute("'NodeInfo' object", name, _RENAMED)


# Not a method: a type checker would believe that every attribute exists.
NodeInfo.__getattr__ = _unknown  # type: ignore[attr-defined]


class _KnownNode:
    """What is known of another node."""

    __slots__ = ("announcement", "at", "present", "seen_ns", "transport", "trust")

    def __init__(self) -> None:
        self.present = True

    def update(self, announcement: Announcement, transport: str, trust: str, runtime: Runtime) -> None:
        self.announcement, self.transport, self.trust = announcement, transport, trust
        self.at, self.seen_ns = runtime.monotonic(), runtime.time_ns()


class NodeRegistry:
    """Lives on the loop."""

    def __init__(
        self,
        config: BusConfig,
        network: Announces,
        published_keys: Collection[str],
        has_log: bool,
        count: Callable[[str, int], None],
        runtime: Runtime,
    ) -> None:
        self._config, self._network, self._published_keys = config, network, published_keys
        self._has_log, self._count, self._runtime = has_log, count, runtime
        self._run, self._started_at = runtime.token_hex(8), runtime.time_ns()
        self._ttl_s = config.node_ttl_s
        self._heard: dict[int, _KnownNode] = {}
        self._soon = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._tell_now_and_then())

    def hear(self, frame: bytes, link: str, trust: str) -> None:
        """Take what another node tells of itself; raise `EventInvalid` for nonsense."""
        told = decode_announcement(frame)
        if told.origin == self._network.origin:
            return
        known = self._heard.get(told.origin)
        if known is None:
            if told.leaving:
                return
            if len(self._heard) >= NODES_MAX:
                self._forget_one()
            known = self._heard[told.origin] = _KnownNode()
            known.update(told, link, trust, self._runtime)
            self.tell_soon()
            _tell(NODE_JOINED, told, link)
            return
        was_there, again = known.present, known.announcement.run != told.run
        if told.leaving and again:
            return  # of an earlier run, overtaken by the next
        known.update(told, link, trust, self._runtime)
        known.present = not told.leaving
        if told.leaving:
            if was_there:
                _tell(NODE_LEFT, told, link, reason="closed")
        elif again or not was_there:
            self.tell_soon()
            _tell(NODE_REJOINED, told, link, reason="restarted" if again else "heard again")

    def tell_soon(self) -> None:
        """There is a new link, or a new node: let it know who is here."""
        self._soon.set()

    def seen(self, origin: int) -> None:
        """A beacon came: it is still there."""
        known = self._heard.get(origin)
        if known is not None and known.present:
            known.at, known.seen_ns = self._runtime.monotonic(), self._runtime.time_ns()

    def nodes(self) -> list[NodeInfo]:
        """This node first, then the others, by name; those that are gone last."""
        others = [
            _node(each.announcement, each.seen_ns, False, each.present, each.transport, each.trust)
            for each in self._heard.values()
        ]
        own = _node(self._announcement(), self._runtime.time_ns(), True, True, "", "self")
        return [own, *sorted(others, key=lambda node: (not node.alive, node.name, node.id))]

    def leave(self) -> None:
        """Say goodbye, if the links still take it."""
        self.task.cancel()
        self._announce(leaving=True)

    async def _tell_now_and_then(self) -> None:
        every_s = self._ttl_s / TELLS_A_TTL
        while True:
            begun = self._runtime.monotonic()
            self._announce()
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._soon.wait()
                await asyncio.sleep(SOON_S)  # one answer to all that came together
                self._soon.clear()
            if self._runtime.monotonic() - begun < every_s * 1.5:
                self._expire()  # else we were frozen ourselves: what others said meanwhile is still to be read

    def _expire(self) -> None:
        now = self._runtime.monotonic()
        for origin, each in list(self._heard.items()):
            if each.present and now - each.at > each.announcement.ttl_s:
                each.present = False
                _tell(NODE_LEFT, each.announcement, each.transport, reason="silent", silent_s=round(now - each.at, 1))
            elif not each.present and now - each.at > max(GONE_KEPT_S, each.announcement.ttl_s):
                del self._heard[origin]

    def _forget_one(self) -> None:
        gone = min(self._heard, key=lambda origin: (self._heard[origin].present, self._heard[origin].at))
        del self._heard[gone]
        self._count("nodes_evicted", 1)

    def _announce(self, leaving: bool = False) -> None:
        told = self._announcement(leaving)
        self._network.announce_frames([(node_key(told.origin), encode_announcement(told))])

    def _announcement(self, leaving: bool = False) -> Announcement:
        config, network, host, pid = self._config, self._network, self._runtime.hostname(), self._runtime.pid()
        lists = [
            [*config.listen, *network.endpoints()],
            sorted(self._published_keys),
            sorted(each for each in network.subscribed if not each.startswith("@zbus/")),
            sorted(each for each in network.served if not each.startswith("@zbus/")),
        ]
        endpoints, publishes, subscribes, serves = [tuple(each[:NAMES_MAX]) for each in lists]
        return Announcement(
            origin=network.origin,
            run=self._run,
            leaving=leaving,
            ttl_s=self._ttl_s,
            name=config.node or f"{host}:{pid}",
            bus=config.bus,
            host=host,
            pid=pid,
            started_at=self._started_at,
            version=__version__,
            has_log=self._has_log,
            endpoints=endpoints,
            publishes=publishes,
            subscribes=subscribes,
            serves=serves,
            more=sum(max(0, len(each) - NAMES_MAX) for each in lists),
            metadata=config.metadata,
        )


def _node(told: Announcement, seen_ns: int, is_self: bool, alive: bool, transport: str, trust: str) -> NodeInfo:
    return NodeInfo(
        f"{told.origin:x}",
        told.name,
        (told.bus,),
        told.host,
        told.pid,
        told.version,
        told.started_at,
        seen_ns,
        is_self,
        alive,
        told.has_log,
        transport,
        trust,
        told.endpoints,
        told.publishes,
        told.subscribes,
        told.serves,
        told.more,
        dict(told.metadata),
    )


def _tell(name: str, told: Announcement, link: str, **fields: Any) -> None:
    node: dict[str, Any] = {"node": f"{told.origin:x}", "node_name": told.name, "bus": told.bus}
    record(name, **node, host=told.host, pid=told.pid, link=link, correlation_id=told.run, **fields)
