"""`SimFabric`: the transport port on a simulated network.

Each ordered pair of nodes has a `Way` with its own random source: it drops, delays and duplicates frames, is cut by a
partition, and has a limited rate if a fault says so. Frames of one key keep their order, and frames of different keys
overtake each other: no transport of zbus promises more. Requests and replies take the same ways. The replies to one
request have no gaps: if one of them is lost, so are all that follow, and the request ends with its timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from zbus.errors import TransportError, TransportUnsupported
from zbus.keys import KeySet
from zbus.ports.fabric import OnReply, OnRequest, Receive

if TYPE_CHECKING:
    from zbus.ports.fabric import Fabric, IncomingRequest, RequestHandle

DECLARE_S = 0.02  # how long other nodes take at most to learn of a subscription
GONE_S = (0.01, 1.0)  # how long a requester takes to notice that the server has gone
SEND_BUFFER_S = 0.5  # a sender is blocked while a slow link has more than this to send
BLOCKED_S_MAX = 15.0
KEYS_KEPT = 4096


class Scheduler(Protocol):
    """Calls functions at a time: the loop of the world."""

    def time(self) -> float:
        """Return the time in seconds."""

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        """Call a function at a time."""


class Conditions(NamedTuple):
    """How a way treats frames."""

    drop: float = 0.0  # the probability that a frame is lost
    duplicate: float = 0.0  # the probability that a frame arrives twice
    delay_s: tuple[float, float] = (0.0001, 0.002)
    bytes_per_s: float = 0.0  # 0: unlimited


Note = Callable[..., None]  # notes a step in the trace: kind, node, values


class Way:
    """From one node to another."""

    __slots__ = ("_busy_until", "_last_at", "_net", "chance", "conditions", "cut", "target")

    def __init__(self, net: SimNet, source: str, target: str) -> None:
        self._net, self.target = net, target
        self.chance = net.source(f"way/{net.url}/{source}/{target}")
        self.conditions = net.conditions
        self.cut = False
        self._busy_until = 0.0
        self._last_at: dict[object, float] = {}  # per key: when its last frame arrives

    def carry(
        self,
        order: object,
        size: int,
        arrive: Callable[..., None],
        args: tuple[Any, ...],
        to: SimFabric,
        once: bool = False,
    ) -> str:
        """Let something arrive, after what has the same `order`. Returns what happened to it.

        `once`: it is never duplicated, as a part of a stream is not.
        """
        conditions, chance = self.conditions, self.chance
        if self.cut:
            return "cut"
        if conditions.drop and chance.random() < conditions.drop:
            return "dropped"
        scheduler = self._net.scheduler
        now = scheduler.time()
        low, high = conditions.delay_s
        at = now + low + chance.random() * (high - low)
        if conditions.bytes_per_s:
            self._busy_until = max(now, self._busy_until) + size / conditions.bytes_per_s
            at = max(at, self._busy_until + low)
        last_at = self._last_at
        at = max(at, last_at.get(order, 0.0))
        if len(last_at) > KEYS_KEPT:
            self._last_at = last_at = {each: when for each, when in last_at.items() if when > now}
        last_at[order] = at
        scheduler.call_at(at, self._arrive, arrive, args, to, context=to.context)
        if conditions.duplicate and not once and chance.random() < conditions.duplicate:
            scheduler.call_at(
                at + low + chance.random() * (high - low), self._arrive, arrive, args, to, context=to.context
            )
            return "duplicated"
        return "sent"

    @property
    def blocked_until(self) -> float:
        """When a sender may send again: its buffer is full until then."""
        return self._busy_until - SEND_BUFFER_S if self.conditions.bytes_per_s else 0.0

    def _arrive(self, arrive: Callable[..., None], args: tuple[Any, ...], to: SimFabric) -> None:
        if self.cut or to.disconnected or to.closed:
            self._net.note("cut", self.target)
            return
        arrive(*args)


class SimNet:
    """A transport that simulated nodes share. `url` is its name: nodes that use the same one reach each other."""

    def __init__(self, url: str, scheduler: Scheduler, source: Callable[[str], Random], note: Note) -> None:
        self.url, self.scheduler, self.source, self.note = url, scheduler, source, note
        self.conditions = Conditions()
        self.fabrics: list[SimFabric] = []
        self._ways: dict[tuple[str, str], Way] = {}
        self.counts: dict[str, int] = {}

    def way(self, source: str, target: str) -> Way:
        """Return the way between two nodes."""
        found = self._ways.get((source, target))
        if found is None:
            found = self._ways[source, target] = Way(self, source, target)
        return found

    def ways(self) -> Iterator[Way]:
        """Return the ways that were used so far."""
        return iter(self._ways.values())

    def set_conditions(self, conditions: Conditions) -> None:
        """Set the conditions of all ways."""
        self.conditions = conditions
        for way in self._ways.values():
            way.conditions = conditions

    def count(self, outcome: str) -> None:
        """Count what happened to a frame."""
        self.counts[outcome] = self.counts.get(outcome, 0) + 1

    def others(self, fabric: SimFabric) -> list[SimFabric]:
        """Return the other nodes' ends of this transport."""
        return [each for each in self.fabrics if each.node != fabric.node]

    def inject(self, target: str, key: str, frame: bytes) -> None:
        """Let a frame arrive at a node as if a stranger had sent it."""
        for fabric in self.fabrics:
            if fabric.node == target:
                self.note("injected", target, key, frame)
                context = fabric.context
                self.scheduler.call_at(self.scheduler.time(), fabric.arrived, key, frame, context=context)


class SimFabric:
    """One node's end of a transport. `block` keeps the calling thread busy until a time; `context` is the process."""

    networked = True
    trust = "none"
    endpoints: Sequence[str] = ()

    def __init__(
        self,
        net: SimNet,
        node: str,
        context: Context | None = None,
        block: Callable[[float], None] = lambda until: None,
        *,
        events_only: bool = False,
        dense: bool = True,
    ) -> None:
        self.net, self.node, self.context, self._block = net, node, context, block
        self.name = net.url.partition("://")[0]
        self.events_only, self.dense = events_only, dense
        self.closed = self.disconnected = False
        self._noticed = False  # a send has raised since it is disconnected
        self._chance = net.source(f"fabric/{net.url}/{node}")
        self._receive: Receive | None = None
        self._keys = _NOTHING
        self._wants: dict[str, bool] = {}  # what other nodes believe
        self._takes: dict[str, bool] = {}  # what is passed on here
        self._new_keys: tuple[float, KeySet] | None = None
        self._served: frozenset[str] = frozenset()
        self._on_request: OnRequest | None = None
        self._serving: dict[_Pending, None] = {}  # requests of others that wait for this node
        self._asking: dict[_Pending, None] = {}
        net.fabrics.append(self)

    # Frames.

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Send frames to the subscribers of their keys."""
        self._check_open()
        net, note = self.net, self.net.note
        passed = len(frames)
        if self.disconnected:  # it breaks during the first send: some of those frames arrive, although it raises
            passed = 0 if self._noticed else self._chance.randrange(len(frames) + 1)
        self._noticed = self.disconnected
        blocked_until = 0.0
        for other in net.others(self):
            way = net.way(self.node, other.node)
            for at, (key, frame) in enumerate(frames):
                if other.wants(key):
                    outcome = "cut"
                    if at < passed:
                        outcome = way.carry(key, len(frame), other.arrived, (key, frame), other)
                    net.count(outcome)
                    note(outcome, self.node, other.node, key, frame)
            blocked_until = max(blocked_until, way.blocked_until)
        if self.disconnected:
            raise TransportError(f"{self.name} is disconnected")
        if blocked_until:
            self._block(min(blocked_until, net.scheduler.time() + BLOCKED_S_MAX))

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive the frames of these keys, as soon as other nodes know."""
        self._check_open()
        self._receive = receive
        keys = KeySet(expressions) if expressions else _NOTHING
        self._takes.clear()
        if not expressions or self._keys is _NOTHING:
            self._keys, self._new_keys = keys, None
            self._wants.clear()
        else:
            self._merge()
            self._new_keys = self.net.scheduler.time() + self._chance.random() * DECLARE_S, keys
            self._wants.clear()

    def wants(self, key: str) -> bool:
        """Return whether other nodes know that this one wants a key."""
        if self._receive is None:
            return False
        if self._new_keys is not None and self._new_keys[0] <= self.net.scheduler.time():
            self._merge()
        found = self._wants.get(key)
        if found is None:
            new = self._new_keys[1] if self._new_keys is not None else self._keys
            # While the expressions change, only a key that both want is certain; others come when all nodes know.
            found = self._wants[key] = key in self._keys and (key in new or new is _NOTHING)
            if len(self._wants) > KEYS_KEPT:
                self._wants.clear()
                self._takes.clear()
        return found

    def _merge(self) -> None:
        if self._new_keys is not None:
            self._keys, self._new_keys = self._new_keys[1], None
            self._wants.clear()
            self._takes.clear()

    def arrived(self, key: str, frame: bytes) -> None:
        """Take a frame from the network."""
        takes = self._takes.get(key)
        if takes is None:
            takes = self._takes[key] = key in (self._keys if self._new_keys is None else self._new_keys[1])
        if takes and not self.closed and self._receive is not None:
            self.net.note("arrived", self.node, key)
            self._receive(frame, None)

    def ready(self, key: str) -> bool:
        """Return whether another node wants the key and can be reached."""
        self._check_open()
        if self.disconnected:
            return False
        return any(
            other.wants(key) and not other.disconnected and not self.net.way(self.node, other.node).cut
            for other in self.net.others(self)
        )

    def check(self, key: str) -> None:
        """Accept every key."""

    # Requests.

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        """Accept requests for these keys."""
        self._check_open()
        if keys and self.events_only:
            raise TransportUnsupported(self.name, "serving requests: it carries only events")
        self._served, self._on_request = frozenset(keys), on_request

    def serves(self, key: str) -> bool:
        """Return whether this node serves a key."""
        return key in self._served

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        """Send a request to one of the nodes that serve the key."""
        self._check_open()
        if self.events_only:
            raise TransportUnsupported(self.name, "sending requests: it carries only events")
        if self.disconnected:
            raise TransportError(f"{self.name} is disconnected")
        scheduler, net = self.net.scheduler, self.net
        pending = _Pending(self, on_reply)
        servers = [each for each in net.others(self) if each.serves(key) and not each.disconnected]
        # A node behind a partition stays known for a while: a request to it is lost.
        known = [each for each in servers if not net.way(self.node, each.node).cut or self._chance.random() < 0.5]
        if not known:
            scheduler.call_at(scheduler.time(), pending.end, context=self.context)
            return pending
        server = known[self._chance.randrange(len(known))]
        self._asking[pending] = None
        pending.timer = scheduler.call_at(scheduler.time() + timeout_s, pending.end, context=self.context)
        request = SimRequest(key, payload, pending, server)
        way = net.way(self.node, server.node)
        outcome = way.carry(pending, len(payload), server.requested, (request,), server, once=True)
        net.count(f"request {outcome}")
        net.note(f"request {outcome}", self.node, server.node, key, payload)
        return pending

    def requested(self, request: SimRequest) -> None:
        """Take a request from the network."""
        if self.closed or self._on_request is None or request.key not in self._served:
            request.close()
            return
        self._serving[request.pending] = None
        self._on_request(request)

    def answered(self, pending: _Pending) -> None:
        """Forget a request that has ended."""
        self._serving.pop(pending, None)

    # The end.

    def gone(self) -> None:
        """The node of this end has disappeared: those that wait for its replies notice it after a while."""
        scheduler = self.net.scheduler
        for pending in self._serving:
            low, high = GONE_S
            at = scheduler.time() + low + self._chance.random() * (high - low)
            scheduler.call_at(at, pending.end, context=pending.fabric.context)
        self._serving.clear()
        if self in self.net.fabrics:
            self.net.fabrics.remove(self)

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of the connection."""
        return {"transport": self.net.url, "connected": not self.disconnected and not self.closed}

    def close(self) -> None:
        """Disconnect. Requests that are in flight end."""
        if self.closed:
            return
        self.closed = True
        self.gone()
        for pending in list(self._asking):
            pending.end()

    def ended(self, pending: _Pending) -> None:
        """Forget a request of this node."""
        self._asking.pop(pending, None)

    def _check_open(self) -> None:
        if self.closed:
            raise TransportError(f"{self.name} is closed")


class _Pending:
    """A request of one node: its handle there, and where its replies arrive."""

    __slots__ = ("_ignored", "_on_reply", "_over", "_received", "fabric", "timer")

    def __init__(self, fabric: SimFabric, on_reply: OnReply) -> None:
        self.fabric, self._on_reply = fabric, on_reply
        self._over = self._ignored = False
        self._received = 0
        self.timer: Any = None

    def receive(self, number: int, data: bytes | None) -> None:
        """Take a reply, or the end of the replies. If an earlier one was lost, the stream is broken."""
        if number != self._received:
            return
        self._received += 1
        if data is None:
            self.end()
        elif not self._over and not self._ignored:
            self._on_reply(data)

    def end(self) -> None:
        """No more replies come."""
        if not self._over:
            self._over = True
            if self.timer is not None:
                self.timer.cancel()
            self.fabric.ended(self)
            if not self._ignored:
                self._on_reply(None)

    def close(self) -> None:
        """Ignore further replies."""
        self._ignored = True
        if self.timer is not None:
            self.timer.cancel()
        self.fabric.ended(self)


class SimRequest:
    """A request at the node that serves it."""

    __slots__ = ("_closed", "_replies", "_server", "key", "payload", "pending")

    def __init__(self, key: str, payload: bytes, pending: _Pending, server: SimFabric) -> None:
        self.key, self.payload, self.pending, self._server = key, payload, pending, server
        self._closed = False
        self._replies = 0

    def reply(self, data: bytes) -> None:
        """Send one reply."""
        if self._closed:
            raise TransportError("the request has ended")
        server = self._server
        if server.closed or server.disconnected:
            raise TransportError(f"{server.name} is disconnected")
        self._carry("reply", data)

    def close(self) -> None:
        """End the replies."""
        if not self._closed:
            self._closed = True
            self._server.answered(self.pending)
            if not self._server.closed and not self._server.disconnected:
                self._carry("end", None)

    def _carry(self, what: str, data: bytes | None) -> None:
        server, client = self._server, self.pending.fabric
        way = server.net.way(server.node, client.node)
        args, self._replies = (self._replies, data), self._replies + 1
        outcome = way.carry(self.pending, len(data or b""), self.pending.receive, args, client, once=True)
        server.net.count(f"{what} {outcome}")
        server.net.note(f"{what} {outcome}", server.node, client.node, self.key, data or b"")
        if way.blocked_until:
            server._block(min(way.blocked_until, server.net.scheduler.time() + BLOCKED_S_MAX))


_NOTHING = KeySet(["@zbus/nothing"])

if TYPE_CHECKING:
    _port: type[Fabric] = SimFabric
    _request: type[IncomingRequest] = SimRequest
    _handle: type[RequestHandle] = _Pending
