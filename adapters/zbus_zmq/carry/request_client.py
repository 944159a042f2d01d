"""Requests to other nodes: one ROUTER socket that is connected to the nodes it has sent requests to.

A request goes to one of the nodes that serve its key, chosen at random, and to this node only if no other node serves
the key. Replies arrive in order and are numbered. Every request ends: with the server's end marker, when the server is
gone, or when its time is over. A node that cannot be connected to is skipped for the next one.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable

import zmq

from zbus.observe.counters import Counters
from zbus.observe.records import EVENT_DROPPED, TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import OnReply
from zbus_zmq.find.discovery import NodeRecord, Nodes
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.links import Links
from zbus_zmq.io.receive import received

PENDING_MAX = 10_000
ID_BYTES = 8
TICK_S = 0.05
UNREACHABLE = (
    zmq.EVENT_CONNECT_RETRIED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)
Socket = zmq.Socket[bytes]


class ZmqPendingRequest:
    """One request in flight."""

    def __init__(self, key: str, payload: bytes, on_reply: OnReply, deadline: float, ident: bytes) -> None:
        self.key, self.payload, self.deadline, self.ident = key, payload, deadline, ident
        self._on_reply = on_reply
        self._lock = threading.Lock()
        self._over = False
        self.node: NodeRecord | None = None  # that it was sent to
        self.route = b""  # to that node
        self.tried: set[str] = set()
        self.replies = 0
        self.cancel: Callable[[], None] = lambda: None

    def take_reply(self, data: bytes) -> None:
        """Pass on a reply. Replies that arrive after `close` are counted too, until the request is cancelled."""
        self.replies += 1
        if not self._over:
            self._on_reply(data)

    def end(self) -> None:
        """Report that no more replies will come. Only the first call has an effect."""
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self._on_reply(None)

    def close(self) -> None:
        """Stop passing on replies, and cancel the request."""
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self.cancel()


class ZmqRequestClient:
    """Sends requests and receives their replies, on the I/O thread."""

    def __init__(self, io: IoThread, socket: Socket, links: Links, own: str, counts: Counters) -> None:
        self._io, self._socket, self._links, self._own, self._counts = io, socket, links, own, counts
        self._pending: dict[bytes, ZmqPendingRequest] = {}
        self._nodes: Nodes = {}
        self._connected: dict[str, str] = {}  # endpoint -> node
        self._routes: dict[str, bytes] = {}  # endpoint -> the socket's name for it
        self._serial = itertools.count()
        self._ticking = False
        socket.set(zmq.ROUTER_MANDATORY, 1)

    def set_nodes(self, nodes: Nodes) -> None:
        """Take over the live nodes: requests to any other node end."""
        self._nodes = nodes
        for request in [each for each in self._pending.values() if each.node is not None]:
            if request.node is not None and request.node.node not in nodes:
                self._end(request)
        for endpoint in [endpoint for endpoint, node in self._connected.items() if node not in nodes]:
            self._disconnect(endpoint)

    def send(self, request: ZmqPendingRequest) -> None:
        """Send a request to one of the nodes that serve its key, or end it immediately."""
        if len(self._pending) >= PENDING_MAX:
            self._counts.report(EVENT_DROPPED, "too_many_requests", request.key)
            request.end()
            return
        self._pending[request.ident] = request
        request.cancel = lambda: self._io.post(lambda: self._cancel(request))
        if not self._ticking:
            self._ticking = True
            self._io.later(TICK_S, self._tick)
        self._try_next(request)

    def on_readable(self) -> None:
        """Receive replies, up to a bound."""
        for frames in received(self._socket):
            parts = [frame.bytes for frame in frames]
            request = self._pending.get(parts[2]) if len(parts) >= 3 else None
            if len(parts) not in (3, 4, 5) or parts[1] not in (b"R", b"E", b"N"):
                self._counts.report(TRANSPORT_INPUT_REJECTED, "reply_invalid", _node_of(parts[0]))
            elif request is None or request.node is None or request.route != parts[0]:
                self._counts.add("reply_late")
            elif parts[1] == b"N" and len(parts) == 3:
                self._try_next(request)
            elif parts[1] == b"R" and len(parts) == 5 and int.from_bytes(parts[3]) == request.replies:
                request.take_reply(parts[4])
            elif parts[1] == b"E" and len(parts) == 4 and int.from_bytes(parts[3]) == request.replies:
                self._end(request)
            else:
                self._counts.report(TRANSPORT_INPUT_REJECTED, "reply_out_of_order", _node_of(parts[0]))
                self._cancel(request)  # or the other node would keep replying
                request.end()

    def connection_changed(self, event: int, endpoint: str) -> None:
        """React to an event of libzmq about one connection."""
        node = self._connected.get(endpoint)
        if node is None:
            return
        if event == zmq.EVENT_DISCONNECTED:
            for request in self._sent_to(node):
                self._end(request)
        elif event in UNREACHABLE:
            # The request was not delivered, and must not be delivered later, so another node may serve it.
            self._disconnect(endpoint)
            for request in self._sent_to(node):
                self._try_next(request)

    def end_all(self) -> None:
        """End every request, because the fabric closes."""
        for request in list(self._pending.values()):
            self._end(request)

    def _sent_to(self, node: str) -> list[ZmqPendingRequest]:
        return [each for each in self._pending.values() if each.node is not None and each.node.node == node]

    def _try_next(self, request: ZmqPendingRequest) -> None:
        serving = [node for node in self._nodes.values() if request.key in node.serves]
        found = [node for node in serving if node.node not in request.tried]
        others = [node for node in found if node.node != self._own]
        for node in random.sample(others, len(others)) or found:
            request.tried.add(node.node)
            if self._send_to(request, node):
                return
        self._end(request)

    def _send_to(self, request: ZmqPendingRequest, node: NodeRecord) -> bool:
        if self._connected.get(node.requests) != node.node:
            self._disconnect(node.requests)  # another node had that port before
            # A new name each time: a connection that was dropped lives on for a moment, and libzmq aborts the process
            # if a second one gets the same name.
            route = f"{node.node}/{next(self._serial)}".encode()
            if not self._links.connect(node.requests, node.curve_key, route):
                return False
            self._connected[node.requests], self._routes[node.requests] = node.node, route
        route = self._routes[node.requests]
        try:
            parts = [route, b"Q", request.ident, request.key.encode(), request.payload]
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # its queue is full, or it is not connected
            self._counts.report("REQUEST_FAILED", "request_failed", node.requests, detail=str(error))
            return False
        request.node, request.route = node, route
        return True

    def _cancel(self, request: ZmqPendingRequest) -> None:
        if self._pending.pop(request.ident, None) is not None and request.node is not None:
            try:
                self._socket.send_multipart([request.route, b"C", request.ident], zmq.NOBLOCK)
            except zmq.ZMQError:  # the server notices when it replies
                self._counts.add("cancel_dropped")

    def _end(self, request: ZmqPendingRequest) -> None:
        self._pending.pop(request.ident, None)
        request.end()

    def _disconnect(self, endpoint: str) -> None:
        if self._connected.pop(endpoint, None) is not None:
            del self._routes[endpoint]
            self._links.drop(endpoint)

    def _tick(self) -> None:
        now = time.monotonic()
        for request in [each for each in self._pending.values() if each.deadline <= now]:
            self._cancel(request)
            request.end()
        self._ticking = bool(self._pending)
        if self._ticking:
            self._io.later(TICK_S, self._tick)


def _node_of(route: bytes) -> str:
    return route.partition(b"/")[0].decode("ascii", "replace")
