"""The connections of one socket: the endpoints that it should be connected to, and those that it is connected to.

libzmq reconnects forever without help. An endpoint that it refuses immediately (a malformed one, or one whose key is
not allowed) stays wanted and is tried again after a pause that grows to a limit. An endpoint that is no longer wanted
is disconnected. Whether a connection is established is known only from the events of the socket's monitor.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_CONNECT_FAILED, record
from zbus.util.backoff import Backoff

from .curve import Keys, is_public_key
from .io_thread import IoThread

PAUSE_S = (0.5, 30.0)
EVENTS_BURST = 1000
REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

Wanted = Mapping[str, str | None]  # endpoint -> the public key of its node, in Z85
Socket = zmq.Socket[bytes]


class Links:
    """The connections of one socket, on its thread. `connected` and `made` may be read on any thread."""

    def __init__(
        self, io: IoThread, socket: Socket, keys: Keys | None, counts: Counters, schemes: tuple[str, ...] = ("tcp://",)
    ) -> None:
        self.connected: frozenset[str] = frozenset()
        self.on_event: Callable[[int, str], None] = lambda event, endpoint: None
        # Called when the first endpoint is connected, and when the last one is lost.
        self.on_linked: Callable[[bool], None] = lambda linked: None
        self._io, self._socket, self._keys, self._counts, self._schemes = io, socket, keys, counts, schemes
        self._wanted: Wanted = {}
        self._made: dict[str, str | None] = {}
        self._failed: dict[str, tuple[float, Backoff]] = {}  # endpoint -> when to try again, the pauses after that
        self._monitor = socket.get_monitor_socket(EVENTS)
        io.on_readable(self._monitor, self._read_events)

    @property
    def made(self) -> int:
        """The number of endpoints that are connected or connecting."""
        return len(self._made)

    def want(self, endpoints: Wanted) -> None:
        """Connect to these endpoints, and disconnect from all others."""
        self._wanted = endpoints
        for endpoint, key in list(self._made.items()):
            if endpoint not in endpoints or endpoints[endpoint] != key:
                self.drop(endpoint)
        self._failed = {endpoint: failed for endpoint, failed in self._failed.items() if endpoint in endpoints}
        self.retry()

    def retry(self) -> None:
        """Connect to the wanted endpoints that are not connected."""
        now = time.monotonic()
        for endpoint, key in self._wanted.items():
            due, backoff = self._failed.get(endpoint) or (0.0, Backoff(*PAUSE_S))
            if endpoint not in self._made and now >= due and not self.connect(endpoint, key):
                pause_s = backoff.next()
                self._failed[endpoint] = now + pause_s, backoff
                self._io.later(pause_s, self.retry)

    def connect(self, endpoint: str, key: str | None, route: bytes | None = None) -> bool:
        """Connect now; return whether libzmq accepted the endpoint."""
        if self._keys is not None:
            if key is None or not is_public_key(key) or not self._keys.permits(key.encode()):
                self._counts.report(TRANSPORT_CONNECT_FAILED, "peer_key_rejected", endpoint)
                return False
            self._socket.set(zmq.CURVE_SERVERKEY, key.encode())
        elif key is not None:
            self._counts.report(TRANSPORT_CONNECT_FAILED, "peer_needs_curve", endpoint)
            return False
        try:
            if not endpoint.startswith(self._schemes):
                raise zmq.ZMQError(errno.EPROTONOSUPPORT)
            if route is not None:
                self._socket.set(zmq.CONNECT_ROUTING_ID, route)
            self._socket.set(zmq.IPV6, "[" in endpoint)
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._counts.report(TRANSPORT_CONNECT_FAILED, "connect_failed", endpoint, detail=str(error))
            return False
        self._made[endpoint] = key
        self._failed.pop(endpoint, None)
        record("TRANSPORT_CONNECTING", logging.DEBUG, endpoint=endpoint)
        return True

    def drop(self, endpoint: str) -> None:
        """Disconnect, and drop the messages that wait to be sent there."""
        self._made.pop(endpoint, None)
        # To find out that a socket is readable, libzmq takes the first part of a message out of its connection. If the
        # connection is gone when the other parts are read, libzmq aborts the process (its issue 3485).
        self._io.read(self._socket)
        try:
            self._socket.disconnect(endpoint)
        except zmq.ZMQError as error:  # libzmq has disconnected it already
            record("TRANSPORT_DISCONNECTING", logging.DEBUG, endpoint=endpoint, error=str(error))
        self._set_connected(self.connected - {endpoint})  # libzmq reports no event for it

    def close(self) -> None:
        """Stop connecting and watching, before the socket is closed."""
        self._wanted = {}
        self._io.forget(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(0)

    def _read_events(self) -> None:
        for _ in range(EVENTS_BURST):
            try:
                found = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            event, endpoint = int(found["event"]), found["endpoint"].decode("utf-8", "replace")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._set_connected(self.connected | {endpoint})
            elif event == zmq.EVENT_DISCONNECTED:
                self._counts.add("disconnected")
                self._set_connected(self.connected - {endpoint})
            elif event in REFUSED:
                self._counts.report(TRANSPORT_CONNECT_FAILED, "handshake_rejected", endpoint)
            self.on_event(event, endpoint)

    def _set_connected(self, connected: frozenset[str]) -> None:
        before, self.connected = bool(self.connected), connected
        if bool(connected) != before:
            self.on_linked(not before)
