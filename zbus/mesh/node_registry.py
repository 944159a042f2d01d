"""The node registry: the nodes of the mesh, their keys and subscriptions, and when each was last seen.

A node announces itself at its start, when it sees a new node, and a few times within its TTL. A node that does not
announce itself within its TTL is considered gone. A node that returns after a restart or a pause is reported as
rejoined. The registry needs no server: each node keeps its own view of the nodes that it can reach.

A node is known by its log. If two processes use copies of one log, each is shown on its own: a process that announces
itself again after another one took its place has not ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from zbus.observe.catalog import CODES
from zbus.observe.records import NODE_JOINED, NODE_LEFT, NODE_REFUSED, NODE_REJOINED, record, record_reason
from zbus.observe.throttle import Throttle
from zbus.util.memo import Memo
from zbus.util.renamed import unknown_attribute
from zbus.util.runtime import Runtime
from zbus.version import __version__
from zbus.wire.announcement import (
    CAPABILITIES,
    NAMES_MAX,
    PROTOCOL,
    PROTOCOL_MIN,
    Announcement,
    decode_announcement,
    encode_announcement,
    node_key,
)

from .host import Announces

if TYPE_CHECKING:
    from zbus.config import BusConfig

ANNOUNCEMENTS_PER_TTL = 3  # how often a node announces itself within its TTL
SOON_S = 0.05  # the delay of an announcement after a new node was seen
NODES_MAX = 10_000
REFUSED_S = 60.0  # a node that is refused is reported once in this time
REFUSED_MAX = 1000
COPIES_MAX = 1000
REPLACED_KEPT = 8  # processes of one node that another one replaced
LATE_S = 2.0  # an announcement of a process that was replaced longer ago than this is not a late one
GONE_KEPT_S = 3600.0  # how long a node that left is remembered, so that its return is reported as rejoining


Process = tuple[str, int]  # its run, and the incarnation of its log: a resumed snapshot has the same run

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
    last_seen: int  # Unix ns, by the clock of this node
    is_self: bool  # it is this bus
    alive: bool
    has_log: bool
    transport: str  # the link over which it was last seen
    trust: str  # how that transport authenticates peers
    endpoints: tuple[str, ...]
    publishes: tuple[str, ...]
    subscribes: tuple[str, ...]
    serves: tuple[str, ...]
    truncated: int  # number of names left out of the four lists
    metadata: Mapping[str, str]
    incarnation: str = "0"  # of its log, in hex
    protocol: int = 1
    capabilities: tuple[str, ...] = ()

    @property
    def topics(self) -> tuple[str, ...]:
        """The keys that it publishes and the key expressions that it subscribes to."""
        return (*self.publishes, *self.subscribes)


def _unknown(self: NodeInfo, name: str) -> Any:
    raise unknown_attribute("'NodeInfo' object", name, _RENAMED)


# Not a method: a type checker would believe that every attribute exists.
NodeInfo.__getattr__ = _unknown  # type: ignore[attr-defined]


class _KnownNode:
    """Another node: its last announcement, when it arrived, and its earlier processes."""

    __slots__ = ("announcement", "at", "process", "replaced", "seen_ns", "transport", "trust")

    def __init__(self) -> None:
        self.process: Process | None = None
        self.replaced = Memo[Process, float](REPLACED_KEPT)  # when another one took their place

    def update(self, announcement: Announcement, transport: str, trust: str, runtime: Runtime) -> None:
        self.announcement, self.transport, self.trust = announcement, transport, trust
        self.at, self.seen_ns = runtime.monotonic(), runtime.time_ns()
        if self.process not in (None, process := _process(announcement)):
            self.replaced[self.process] = self.at
        self.process = process


class NodeRegistry:
    """The nodes that this one has seen. Lives on the loop."""

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
        # Two dicts, because nodes that are gone are evicted first. In each, the least recently seen node comes first.
        self._present: OrderedDict[int, _KnownNode] = OrderedDict()
        self._gone: OrderedDict[int, _KnownNode] = OrderedDict()
        # Further processes that use copies of the log of a node, by origin and process.
        self._copies: dict[tuple[int, Process], _KnownNode] = {}
        self._refusals = Throttle(REFUSED_S, runtime.monotonic)
        self._refused = Memo[tuple[int, int], None](REFUSED_MAX)  # by origin and incarnation
        self._soon = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._announce_periodically())

    def receive(self, frame: bytes, link: str, trust: str) -> int:
        """Register the announcement of another node, and return its id. Raises `EventInvalid` for a malformed frame."""
        announcement = decode_announcement(frame)
        self._register(announcement, link, trust)
        return announcement.origin

    def _register(self, announcement: Announcement, link: str, trust: str) -> None:
        origin = announcement.origin
        if origin == self._network.origin and announcement.branch.id in (0, self._network.branch.id):
            return
        if announcement.protocol_min > PROTOCOL or announcement.protocol < PROTOCOL_MIN:
            self._refuse(announcement, link)
            return
        self._refused.pop((origin, announcement.branch.id), None)
        was_present = origin in self._present
        known = self._present.get(origin) or self._gone.get(origin)
        if known is None:
            if announcement.leaving:
                return
            if len(self._present) + len(self._gone) >= NODES_MAX:
                self._evict_one()
            known = self._present[origin] = _KnownNode()
            known.update(announcement, link, trust, self._runtime)
            self.announce_soon()
            record(NODE_JOINED, **_fields(announcement, link))
            return
        if known.process != _process(announcement) and self._receive_copy(known, announcement, link, trust):
            return
        restarted = known.announcement.run != announcement.run
        if announcement.leaving and restarted:
            return  # a late message of its earlier run
        known.update(announcement, link, trust, self._runtime)
        del (self._present if was_present else self._gone)[origin]
        (self._gone if announcement.leaving else self._present)[origin] = known
        if announcement.leaving:
            if was_present:
                _report(NODE_LEFT, announcement, link, "node_closed")
        elif restarted or not was_present:
            self.announce_soon()
            _report(NODE_REJOINED, announcement, link, "node_restarted" if restarted else "node_seen_again")

    def _receive_copy(self, known: _KnownNode, announcement: Announcement, link: str, trust: str) -> bool:
        """Register the announcement of a process that uses a copy of a node's log. Returns whether it is one."""
        key = announcement.origin, _process(announcement)
        copy, replaced_at = self._copies.get(key), known.replaced.get(key[1])
        if copy is None and replaced_at is None:
            ended = [each for each in self._copies if each[0] == key[0] and each[1][1] == announcement.branch.parent]
            if not ended:
                return False
            copy = self._copies[key] = self._copies.pop(ended[0])  # the copy was restarted
            _report(NODE_REJOINED, announcement, link, "node_restarted")
        if copy is None:
            is_late = announcement.leaving or self._runtime.monotonic() - (replaced_at or 0.0) < LATE_S
            if is_late or len(self._copies) >= COPIES_MAX:
                return True
            copy = self._copies[key] = _KnownNode()
            self.announce_soon()
            record(NODE_JOINED, **_fields(announcement, link))
        copy.update(announcement, link, trust, self._runtime)
        if announcement.leaving:
            del self._copies[key]
            _report(NODE_LEFT, announcement, link, "node_closed")
        return True

    def _refuse(self, announcement: Announcement, link: str) -> None:
        self._count("nodes_refused", 1)
        self._refused[announcement.origin, announcement.branch.id] = None
        if self._refusals.due(announcement.origin):
            reason = (
                f"its protocol has version {announcement.protocol} and needs {announcement.protocol_min} or later; "
                f"this node has version {PROTOCOL} and needs {PROTOCOL_MIN} or later. Upgrade the older one"
            )
            code = "protocol_unsupported"
            record_reason(NODE_REFUSED, logging.ERROR, code=code, reason=reason, **_fields(announcement, link))

    def is_refused(self, origin: int, incarnation: int) -> bool:
        """Return whether a node was refused, so that its frames could be misread."""
        return (origin, incarnation) in self._refused

    def announce_soon(self) -> None:
        """Announce this node soon, because there is a new link or a new node."""
        self._soon.set()

    def seen(self, origin: int, incarnation: int = 0) -> None:
        """Note that a node sent a beacon, so it is alive."""
        known = self._present.get(origin)
        for (of, (_, each)), copy in self._copies.items():
            if (of, each) == (origin, incarnation):
                copy.at, copy.seen_ns = self._runtime.monotonic(), self._runtime.time_ns()
                return
        if known is not None:
            known.at, known.seen_ns = self._runtime.monotonic(), self._runtime.time_ns()
            self._present.move_to_end(origin)

    @property
    def present(self) -> tuple[int, ...]:
        """The ids of the nodes that are connected."""
        return tuple(self._present)

    def nodes(self) -> list[NodeInfo]:
        """Return this node first, then the others by name, and those that are gone last."""
        others = [
            _node(each.announcement, each.seen_ns, False, present, each.transport, each.trust)
            for present, nodes in ((True, self._present), (True, self._copies), (False, self._gone))
            for each in nodes.values()
        ]
        own = _node(self._announcement(), self._runtime.time_ns(), True, True, "", "self")
        return [own, *sorted(others, key=lambda node: (not node.alive, node.name, node.id, node.incarnation))]

    def leave(self) -> None:
        """Stop, and announce that this node leaves."""
        self.task.cancel()
        self._announce(leaving=True)

    async def _announce_periodically(self) -> None:
        every_s = self._ttl_s / ANNOUNCEMENTS_PER_TTL
        while True:
            begun = self._runtime.monotonic()
            self._announce()
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._soon.wait()
                await asyncio.sleep(SOON_S)  # one announcement for all nodes that appeared together
                self._soon.clear()
            if self._runtime.monotonic() - begun < every_s * 1.5:
                self._expire()  # otherwise this process was suspended, and announcements are still unread

    def _expire(self) -> None:
        now = self._runtime.monotonic()
        for origin, each in list(self._gone.items()):
            if now - each.at > max(GONE_KEPT_S, each.announcement.ttl_s):
                del self._gone[origin]
        for origin, each in list(self._present.items()):
            if now - each.at > each.announcement.ttl_s:
                self._gone[origin] = self._present.pop(origin)
                _report(NODE_LEFT, each.announcement, each.transport, "node_silent", silent_s=round(now - each.at, 1))

        for key, each in list(self._copies.items()):
            if now - each.at > each.announcement.ttl_s:
                del self._copies[key]
                _report(NODE_LEFT, each.announcement, each.transport, "node_silent", silent_s=round(now - each.at, 1))

    def _evict_one(self) -> None:
        (self._gone or self._present).popitem(last=False)
        self._count("nodes_evicted", 1)

    def _announce(self, leaving: bool = False) -> None:
        announcement = self._announcement(leaving)
        self._network.announce_frames([(node_key(announcement.origin), encode_announcement(announcement))])

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
            branch=network.branch,
            protocol=PROTOCOL,
            protocol_min=PROTOCOL_MIN,
            capabilities=CAPABILITIES,
        )


def _node(announcement: Announcement, seen_ns: int, here: bool, present: bool, transport: str, trust: str) -> NodeInfo:
    return NodeInfo(
        f"{announcement.origin:x}",
        announcement.name,
        (announcement.bus,),
        announcement.host,
        announcement.pid,
        announcement.version,
        announcement.started_at,
        seen_ns,
        here,
        present,
        announcement.has_log,
        transport,
        trust,
        announcement.endpoints,
        announcement.publishes,
        announcement.subscribes,
        announcement.serves,
        announcement.more,
        dict(announcement.metadata),
        f"{announcement.branch.id:x}",
        announcement.protocol,
        announcement.capabilities,
    )


def _process(announcement: Announcement) -> Process:
    return announcement.run, announcement.branch.id


def _fields(announcement: Announcement, link: str) -> dict[str, Any]:
    node = {"node": f"{announcement.origin:x}", "node_name": announcement.name, "bus": announcement.bus}
    process = {"host": announcement.host, "pid": announcement.pid, "link": link}
    return node | process | {"correlation_id": announcement.run}


def _report(name: str, announcement: Announcement, link: str, code: str, **fields: float) -> None:
    record_reason(name, logging.INFO, code=code, reason=CODES[code], **_fields(announcement, link), **fields)
