"""Connections that should be there, and those that are: one socket, many endpoints.

libzmq connects again by itself, for ever. What it refuses at once (an endpoint that is none, a key that is not
allowed) stays wanted and is tried again after a pause that grows to a limit. What is no longer wanted is disconnected.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from zbus.observe.counters import Counts
from zbus.observe.records import FABRIC_CONNECT_FAILED, record

from .curve import Keys, is_public_key
from .io_thread import IoThread

PAUSE_S = (0.5, 30.0)
EVENTS_BURST = 1000

Wanted = Mapping[str, str | None]  # endpoint -> the public key of its node, in Z85
Socket = zmq.Socket[bytes]


class Links:
    """The connections of one socket, on its thread."""

    def __init__(self, io: IoThread, socket: Socket, keys: Keys | None, counts: Counts) -> None:
        self._io, self._socket, self._keys, self._counts = io, socket, keys, counts
        self._wanted: Wanted = {}
        self._made: dict[str, str | None] = {}
        self._failed: dict[str, tuple[float, float]] = {}  # endpoint -> when to try again, the pause after that

    @property
    def made(self) -> int:
        """How many endpoints are connected to, or being connected to."""
        return len(self._made)

    def want(self, endpoints: Wanted) -> None:
        """Be connected to these and to no others."""
        self._wanted = endpoints
        for endpoint, key in list(self._made.items()):
            if endpoint not in endpoints or endpoints[endpoint] != key:
                self.drop(endpoint)
        self._failed = {endpoint: pause for endpoint, pause in self._failed.items() if endpoint in endpoints}
        self.retry()

    def retry(self) -> None:
        """Try what is wanted and not there."""
        now = time.monotonic()
        for endpoint, key in self._wanted.items():
            due, pause = self._failed.get(endpoint, (0.0, PAUSE_S[0]))
            if endpoint not in self._made and now >= due and not self.connect(endpoint, key):
                self._failed[endpoint] = now + pause, min(PAUSE_S[1], pause * 2)
                self._io.later(pause, self.retry)

    def connect(self, endpoint: str, key: str | None, route: bytes | None = None) -> bool:
        """Connect now; whether libzmq took it."""
        if self._keys is not None:
            if key is None or not is_public_key(key) or not self._keys.permits(key.encode()):
                self._counts.tell(FABRIC_CONNECT_FAILED, "peer_key_refused", endpoint)
                return False
            self._socket.set(zmq.CURVE_SERVERKEY, key.encode())
        elif key is not None:
            self._counts.tell(FABRIC_CONNECT_FAILED, "peer_needs_curve", endpoint)
            return False
        try:
            if not endpoint.startswith("tcp://"):
                raise zmq.ZMQError(errno.EPROTONOSUPPORT)
            if route is not None:
                self._socket.set(zmq.CONNECT_ROUTING_ID, route)
            self._socket.set(zmq.IPV6, "[" in endpoint)
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._counts.tell(FABRIC_CONNECT_FAILED, "connect_failed", endpoint, detail=str(error))
            return False
        self._made[endpoint] = key
        self._failed.pop(endpoint, None)
        record("CONNECTING", logging.DEBUG, endpoint=endpoint)
        return True

    def drop(self, endpoint: str) -> None:
        """Disconnect, and forget what waits to be sent there."""
        self._made.pop(endpoint, None)
        # To tell that a socket is readable, libzmq takes the first part of a message out of its connection. Were
        # that gone when the other parts are read, it would abort the process (libzmq's issue 3485).
        self._io.read(self._socket)
        try:
            self._socket.disconnect(endpoint)
        except zmq.ZMQError as error:  # libzmq let go of it already
            record("DISCONNECTING", logging.DEBUG, endpoint=endpoint, error=str(error))


def watch_events(
    io: IoThread, socket: Socket, happened: Callable[[int, str], None], events: int = zmq.EVENT_ALL
) -> None:
    """Call `happened` with each event of a socket's connections and its endpoint, on the I/O thread."""
    monitor = socket.get_monitor_socket(events)

    def on_readable() -> None:
        for _ in range(EVENTS_BURST):
            try:
                event = recv_monitor_message(monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            happened(int(event["event"]), event["endpoint"].decode("utf-8", "replace"))

    io.on_readable(monitor, on_readable)
