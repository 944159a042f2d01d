"""ZMQ as a fabric: a node publishes on a socket of its own, or through brokers, and serves requests on another one.

A fabric has one I/O thread, one context and a constant number of sockets: an XPUB for the events of this process, a SUB
for those of all others, a ROUTER for requests to this node and one for requests to others. Nodes find each
other by discovery. In broker mode events go through brokers; requests still go directly.

Messages can be lost: libzmq keeps messages in flight in memory, so a connection that breaks loses them. A stalled
subscriber misses messages after `stall_s` seconds, which are counted. The layer above detects gaps and requests the
missing events from the publisher's log.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_ERROR, record, record_reason
from zbus.ports.fabric import OnReply, OnRequest, Receive, RequestHandle

from .address.options import ZmqOptions, read_options
from .carry.publishing import ZmqPublishing, stamped
from .carry.receiving import ZmqReceiving
from .carry.request_client import ID_BYTES, ZmqPendingRequest, ZmqRequestClient
from .carry.request_server import ZmqRequestServer
from .find.discovery import NODE_ID_BYTES, Discovery, NodeRecord, Nodes
from .find.file_registry import FileRegistry
from .find.lease import describe_lease
from .find.liveliness import LivelinessDiscovery
from .io.curve import attach_authenticator, open_keys, read_public
from .io.io_thread import IoThread
from .io.links import Links
from .io.sockets import any_port, bind, make_socket

if TYPE_CHECKING:
    from zbus.config import BusConfig
    from zbus.ports.fabric import Fabric

LISTEN_S = 0.5  # how long `listen` waits until known publishers have received the subscription
GRACE_S = 0.3  # after the start, a request waits this long for a node that serves its key
DRAIN_S = 2.0  # a node withdraws before it has sent everything: its events are received for this long
RESETTLE_S = 3.0  # after all brokers were away: subscribers take as long to connect again

# The ways to find nodes, by the value of the option `discovery`. The last argument is the application's Zenoh session.
DISCOVERIES: Mapping[str, Callable[[ZmqOptions, Counters, Any], Discovery]] = {
    "file": lambda options, counts, session: FileRegistry(options, counts),
    "zenoh": LivelinessDiscovery,
}


def open_fabric(config: BusConfig, url: str, session: Any = None) -> Fabric:
    """Open the fabric of a `zmq://` URL. Blocks: call it off the loop."""
    return ZmqFabric(read_options(config, url), session)


class ZmqFabric:
    """A node's ZMQ sockets as a `Fabric`."""

    name = "zmq"
    networked = True
    events_only = False
    dense = True
    endpoints: Sequence[str] = ()

    def __init__(self, options: ZmqOptions, session: Any = None) -> None:
        self.node = secrets.token_hex(NODE_ID_BYTES)
        self._options = options
        self._counts = Counters(self.name)
        self._keys = open_keys(options, self._counts)
        self.trust = "curve" if self._keys is not None else "none"
        self._broker_key = read_public(options.broker_key, "broker_key").decode() if options.broker_key else None
        self._served: tuple[str, ...] = ()
        self._served_lock = threading.Lock()
        self._turn = 0
        self._silent: set[str] = set()  # publishers that did not acknowledge the last `listen` in time
        self._nodes: Nodes = {}
        self._leaving: dict[str, NodeRecord] = {}  # nodes that left recently
        self._opened_at = time.monotonic()
        self._closed = False
        self._discovery: Discovery | None = None
        self._io = IoThread("zbus-zmq", self._counts)
        try:
            self._io.call("open its sockets", self._open_sockets)
            self._discovery = DISCOVERIES[options.discovery](options, self._counts, session)
            self._join(self._discovery)
        except BaseException:
            self.close()
            raise
        record("TRANSPORT_OPEN", logging.DEBUG, transport=self.name, node=self.node, publish=self._publish_endpoint)

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Queue frames for the I/O thread; wait while the queue is full or no broker is connected."""
        if frames:
            self._publishing.send(frames)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        """Subscribe, and wait a moment until the known publishers have received the subscription."""
        still_silent = self._receiving.acknowledged(self._turn, self._silent, 0.0)
        self._turn = self._receiving.listen(expressions, receive)
        known = self._nodes.keys() - {self.node}
        self._receiving.acknowledged(self._turn, known - still_silent, LISTEN_S)
        self._silent = self._receiving.acknowledged(self._turn, known, 0.0)

    def ready(self, key: str) -> bool:
        """Return whether a subscription of another node may match `key`."""
        return not self._closed and self._publishing.wants(key)

    def check(self, key: str) -> None:
        """Accept every valid key."""

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        """Serve requests for these keys, and announce it to the other nodes."""
        with self._served_lock:
            self._check_open("serve requests")
            self._server.serve(keys, on_request)
            self._served = tuple(keys)
            self._announce()

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        """Send a request to one of the nodes that serve `key`; if none is known, read discovery again first."""
        self._check_open("send a request")
        request = ZmqPendingRequest(key, payload, on_reply, time.monotonic() + timeout_s, os.urandom(ID_BYTES))
        nodes = self._nodes
        if not any(key in node.serves for node in nodes.values() if node.node != self.node):
            nodes = self._look()
        grace = min(self._opened_at + GRACE_S, request.deadline)
        while time.monotonic() < grace and not any(key in node.serves for node in nodes.values()):
            time.sleep(GRACE_S / 10)  # blocks only the caller's thread
            nodes = self._look()
        self._io.post(lambda: self._send_request(request, nodes))
        return request

    def diagnostics(self) -> dict[str, Any]:
        """Return the node, its endpoints, the queues and the counters."""
        return {
            "fabric": self.name,
            "networked": self.networked,
            "node": self.node,
            "mode": "broker" if self._options.brokered else "direct",
            "encrypted": self._keys is not None,
            "publish": self._publish_endpoint,
            "requests": self._request_endpoint,
            "connections": self._subscriptions.made,
            "brokers_connected": len(self._brokers.connected) if self._options.brokered else 0,
            **self._publishing.diagnostics(),
            "discovery": self._discovery.diagnostics() if self._discovery is not None else {},
            "counts": self._counts.snapshot(),
        }

    def leases(self) -> list[dict[str, Any]]:
        """Return the live leases of the file registry, or none if another kind of discovery is used."""
        listing = getattr(self._discovery, "leases", None)
        try:
            return [describe_lease(each) for each in listing()] if listing is not None else []
        except OSError as error:
            raise TransportError(f"the registry cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Withdraw, send queued messages for a bounded time, and close every socket. Safe to call twice."""
        self._closed = True
        try:
            if self._discovery is not None:
                self._discovery.close()
        finally:
            publishing = getattr(self, "_publishing", None)  # missing if opening failed
            if publishing is not None:
                publishing.close()
            # Draining and lingering take at most `linger_s` each.
            if not self._io.close(2 * self._options.linger_s + 2.0):
                record_reason(
                    TRANSPORT_ERROR,
                    logging.ERROR,
                    code="close_timeout",
                    reason="the I/O thread did not stop in time",
                    transport=self.name,
                    doing="close",
                )

    # opening, on the I/O thread

    def _open_sockets(self) -> None:
        io, options, keys, counts = self._io, self._options, self._keys, self._counts
        if keys is not None:
            attach_authenticator(io.context, keys, counts, io.on_readable)
        brokered = options.brokered
        xpub = make_socket(io.context, zmq.XPUB, options, keys, server=not brokered)
        sub = make_socket(io.context, zmq.SUB, options, keys, server=False)
        router = make_socket(io.context, zmq.ROUTER, options, keys, server=True)
        client = make_socket(io.context, zmq.ROUTER, options, keys, server=False)
        shape = stamped(self.node) if brokered else None
        self._publishing = ZmqPublishing(io, xpub, self.node, options, counts, shape=shape)
        self._receiving = ZmqReceiving(io, sub, self.node, counts, brokers=len(options.xpub) if brokered else 0)
        self._server = ZmqRequestServer(io, router, counts)
        links = Links(io, client, keys, counts)
        self._client = ZmqRequestClient(io, client, links, self.node, counts)
        links.on_event = self._client.connection_changed
        self._subscriptions = Links(io, sub, keys, counts)
        self._publish_endpoint = None if brokered else bind(xpub, options.bind, options)
        self.endpoints = () if self._publish_endpoint is None else (self._publish_endpoint,)
        self._request_endpoint = bind(router, any_port(options.bind), options)
        if brokered:
            self._connect_brokers(xpub)
        for socket, handler in (
            (xpub, self._publishing.on_readable),
            (sub, self._receiving.on_readable),
            (router, self._server.on_readable),
            (client, self._client.on_readable),
        ):
            io.on_readable(socket, handler)
        io.at_end(self._end)

    def _connect_brokers(self, xpub: zmq.Socket[bytes]) -> None:
        self._publishing.set_linked(False)
        # Messages that wait for a disconnected broker would arrive out of order with those through other brokers.
        xpub.set(zmq.IMMEDIATE, 1)
        self._brokers = Links(self._io, xpub, self._keys, self._counts)
        self._brokers.on_linked = self._broker_linked
        self._brokers.want(dict.fromkeys(self._options.xsub, self._broker_key))
        self._subscriptions.want(dict.fromkeys(self._options.xpub, self._broker_key))

    def _end(self) -> None:
        self._publishing.drain(self._options.linger_s)
        self._client.end_all()
        self._server.end_all()

    # discovery

    def _join(self, discovery: Discovery) -> None:
        self._announce()
        nodes = self._look()
        self._io.call("look for others", lambda: self._found(nodes))
        self._io.call("wait for others", lambda: self._expect(self._options.settle_s))
        discovery.watch(lambda found: self._io.post(lambda: self._found(found)))

    def _announce(self) -> None:
        if self._discovery is not None:
            self._discovery.announce(
                NodeRecord(
                    node=self.node,
                    publish=self._publish_endpoint,
                    requests=self._request_endpoint,
                    serves=self._served,
                    curve_key=self._keys.public.decode() if self._keys is not None else None,
                )
            )

    def _look(self) -> Nodes:
        return self._discovery.look() if self._discovery is not None else {}

    def _found(self, nodes: Nodes) -> None:
        """Take over the live nodes, on the I/O thread. A connection to a node that is gone is kept for a moment."""
        gone = {name: node for name, node in self._nodes.items() if name not in nodes}
        self._nodes = nodes
        if gone:
            self._leaving.update(gone)
            self._receiving.forget(gone)
            self._io.later(DRAIN_S, lambda: self._forget(gone))
        self._connect()
        self._client.set_nodes(nodes)

    def _forget(self, gone: Nodes) -> None:
        for name in gone:
            self._leaving.pop(name, None)
        self._connect()

    def _connect(self) -> None:
        if not self._options.brokered:
            nodes = (*self._leaving.values(), *self._nodes.values())
            self._subscriptions.want(
                {each.publish: each.curve_key for each in nodes if each.publish is not None and each.node != self.node}
            )

    def _send_request(self, request: ZmqPendingRequest, nodes: Nodes) -> None:
        self._found(nodes)
        self._client.send(request)

    def _expect(self, within_s: float) -> None:
        self._publishing.expect(self._nodes.keys() - {self.node}, within_s)

    def _broker_linked(self, linked: bool) -> None:
        if linked:
            self._expect(RESETTLE_S)
        self._publishing.set_linked(linked)

    def _check_open(self, doing: str) -> None:
        if self._closed:
            raise TransportError(f"cannot {doing}: the fabric is closed")


if TYPE_CHECKING:
    _port: type[Fabric] = ZmqFabric
