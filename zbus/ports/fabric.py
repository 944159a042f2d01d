"""The transport port: the interface between the core and a fabric, which carries frames between nodes.

To add a transport, implement `Fabric` in a package of your own and register its factory as an entry point:

    [project.entry-points."zbus.fabrics"]
    carrier = "my_package.fabric:open_fabric"   # open_fabric(config: BusConfig, url: str, session: Any) -> Fabric

`zbus.open(transport="carrier://host")` then calls the factory, off the event loop. The factory connects, or raises
`TransportError` within bounded time. `session` is for fabrics that can use a session of the application: reject it
otherwise. The entry point is the only way to register a fabric: the package must be installed (`pip install -e .` is
enough), and installed again after the entry point was added. To check the implementation, add it to the contract
suite: to `MESHES` in `tests/support/contract_transports.py` or, if it is `events_only`, to `EVENTS_ONLY` in
`tests/contract/test_fabric_unsupported.py`. `zbus_nats.fabric` is a complete example, `zbus_nats.raw` one for events
only, which inherits from `EventsOnly`.

A fabric delivers frames at most once or at least once, as its network can: the core detects gaps, requests missing
events from the publisher's log, and removes duplicates. A fabric therefore stores nothing and never retries. It knows
nothing of logs and events: keys are routes, and payloads are opaque bytes. The exception is `events_only`: without
requests there is no repair, so events that such a fabric loses are final, and only reported.

Threads: the core calls `check`, `diagnostics` and `RequestHandle.close`, and reads `endpoints` and `trust`, on the
event loop, so they must return at once: the whole node waits for them. It calls everything else on other threads,
concurrently, and these calls may block for a bounded time. The core cannot interrupt a call that blocks for longer: a
`send` delays the other events of this fabric, a `listen` or `serve` the subscriptions of the whole node, and
`close` the end of `bus.aclose()`.

Callbacks: a fabric may call back on any thread, even before `listen`, `serve` or `request` has returned. Callbacks
queue their argument and return at once. After `close`, calls are permitted and have no effect. Frames that are still
passed to a callback that a later `listen` has replaced are received as well. `on_reply` must not be called after None;
the core ignores such calls.

Errors: a fabric raises `TransportError` and lets no exception of its library through. Malformed input from the network
is counted and logged, and never stops the fabric. If a fabric raises something else, that is a defect, which the core
records with its traceback. It then sends again after a pause, as after a `TransportError`; it continues without the
result of `listen`, `serve`, `diagnostics`, `endpoints`, `trust`, an acknowledgement, a reply or `close`; and it tries
the next fabric for a request. Exceptions of the factory, of the first `listen` and `serve`, and of `check` reach the
caller of the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from zbus.errors import TransportUnsupported

# The callback for received frames: the frame, and a function to acknowledge it or None. Pass such a function only if
# the network redelivers unacknowledged frames. The core calls it once its log has stored all events of the frame.
Receive = Callable[[bytes, Callable[[], None] | None], None]

# The callback for the replies to one request, in order. None is the last call: no more replies will come.
OnReply = Callable[[bytes | None], None]


class IncomingRequest(Protocol):
    """A request from another node. Only that node receives the replies, in the order in which they are sent."""

    key: str
    payload: bytes

    def reply(self, data: bytes) -> None:
        """Send one reply. May block while the network is slow. Raises `TransportError` if it cannot be sent."""

    def close(self) -> None:
        """End the replies: the requester's `on_reply` is called with None. A second call has no effect."""


# The callback for requests from other nodes.
OnRequest = Callable[[IncomingRequest], None]


class RequestHandle(Protocol):
    """A request that this node has sent."""

    def close(self) -> None:
        """Ignore further replies. Replies that are being delivered may still arrive. A second call has no effect."""


class Fabric(Protocol):
    """A connection to other nodes. It carries frames to every subscriber of a key, and requests to one server of a key.

    Two nodes may each send and receive at the same time. Frames of one sender and key arrive in the order in which
    they were sent. A frame arrives unchanged and whole, whatever its size. After a disconnection the fabric reconnects
    automatically and restores what `listen` and `serve` set.
    """

    name: str  # the scheme of its URL, for log records
    networked: bool  # False if no other node can be connected (embedded Zenoh); the core then only holds it open
    events_only: bool  # the other end understands only events: no beacons, announcements or requests are sent
    trust: str  # how peers are authenticated: "none", or "login", "tls", "mtls" and "curve", joined with "+"
    endpoints: Sequence[str]  # addresses at which other nodes can connect to this one; empty if there are none
    # Frames carry every sequence of a publisher, so that a gap in those of a node without a log means loss. False if
    # the network delivers only some of them. This only decides whether such gaps are reported.
    dense: bool

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Send frames in order, each to the subscribers of its concrete key. Blocks while the network is slow.

        It blocks for 15 s at most. On return the frames count as sent, so with a broker that acknowledges, wait for
        that. Raises `TransportError` if there is no connection. Any number of the frames may then have been sent. The
        caller sends all of them again later, and receivers remove duplicates.
        """

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Receive the frames that other nodes send to the keys that match, in place of the earlier expressions.

        Without expressions, nothing is received, and the connection stays open. The expressions are canonical key
        expressions. The fabric filters exactly: if its network cannot express a
        wildcard, it subscribes more widely and filters here. A frame arrives once, even if several expressions match
        it; while expressions change, a frame that both sets match may arrive twice, and is not lost. A node does not
        receive its own frames. Returns when the subscriptions are active, as far as this end can know. While
        disconnected, it keeps the expressions for the next connection and returns.
        """

    def ready(self, key: str) -> bool:
        """Return whether the fabric is connected and another node subscribes to `key`.

        A network that does not reveal its subscribers returns whether it is connected. A node without a log waits
        briefly for this before it sends its first event.
        """

    def check(self, key: str) -> None:
        """Raise `KeyInvalid` if this fabric cannot carry a key that is otherwise valid. Prefer to escape characters."""

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        """Accept requests for these concrete keys, in place of the earlier ones.

        If several nodes serve a key, one of them receives each request. Raises `TransportUnsupported` if the fabric is
        `events_only` and `keys` is not empty.
        """

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        """Send a request to one of the other nodes that serve `key`.

        Calls `on_reply` for each reply and then with None: after the last reply, when the server disconnects, and after
        `timeout_s` at the latest. If no node serves the key, calls `on_reply(None)` immediately. Raises
        `TransportError` if the request cannot be sent, and `TransportUnsupported` if the fabric is `events_only`.
        """

    def diagnostics(self) -> dict[str, Any]:
        """Return the state of the connection for `bus.diagnostics()`, without secrets."""

    def close(self) -> None:
        """Disconnect within 6 s, whatever the network does. A second call has no effect.

        Requests that are in flight end with `on_reply(None)`. Later calls of `send`, `listen`, `serve` and
        `request` raise `TransportError`.
        """


class EventsOnly:
    """Base of a fabric that is `events_only`, because the programs at its other end are not zbus nodes."""

    name: str
    networked = True
    events_only = True
    trust = "none"
    endpoints: Sequence[str] = ()

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        """Raise `TransportUnsupported` if there are keys to serve."""
        if keys:
            self._lacks("serving requests")

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        """Raise `TransportUnsupported`."""
        self._lacks("sending requests")

    def _lacks(self, capability: str) -> NoReturn:
        raise TransportUnsupported(self.name, f"{capability}: it carries only events")
