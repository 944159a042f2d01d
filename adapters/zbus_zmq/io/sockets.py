"""Sockets with limits on everything, and the ports they listen on.

A port is allocated by binding it, so it cannot be lost between choosing and binding. A port comes from the system
(port 0), from a configured range, or from portpicker's port server if `PORTSERVER_ADDRESS` is set.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import zmq

from zbus.errors import TransportError
from zbus_zmq.address.options import ZmqOptions
from zbus_zmq.address.topics import TOPIC_BYTES_MAX

if TYPE_CHECKING:
    from .curve import Keys

PORTSERVER_VARIABLE = "PORTSERVER_ADDRESS"
PORTSERVER_TRIES = 20
RECONNECT_MS = (50, 2_000)
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
HANDSHAKE_MS = 5_000
SUBSCRIPTION_BYTES_MAX = TOPIC_BYTES_MAX + 64  # with what libzmq and CURVE add to a topic

Socket = zmq.Socket[bytes]


def make_socket(
    context: zmq.Context[Socket], kind: int, options: ZmqOptions, keys: Keys | None, *, server: bool
) -> Socket:
    """Return a socket with every limit set. CURVE needs to know whether it binds (`server`) or connects."""
    socket = context.socket(kind)
    # Subscribers send only subscriptions, and libzmq would silently drop those over the limit.
    socket.set(zmq.SNDHWM, 0 if kind in (zmq.SUB, zmq.XSUB) else options.hwm)
    socket.set(zmq.RCVHWM, options.hwm)
    # A publisher receives only subscriptions. libzmq keeps each in a tree that takes about 50 times its size.
    socket.set(zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES_MAX if kind == zmq.XPUB else options.max_message_bytes)
    # A subscriber or a client has nothing to send that matters after it closes.
    socket.set(zmq.LINGER, int(options.linger_s * 1000) if server or kind == zmq.XPUB else 0)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS[0])
    socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if keys is not None:
        keys.equip(socket, server=server)
    return socket


def bind(socket: Socket, endpoint: str, options: ZmqOptions) -> str:
    """Bind to an endpoint, whose port may be `*`, and return the address where others reach the socket."""
    host, _, port = endpoint.rpartition(":")
    socket.set(zmq.IPV6, "[" in host)
    if port != "*":
        candidates: Iterator[int] = iter([int(port)])
    elif options.ports is not None:
        candidates = _range(*options.ports)
    elif os.environ.get(PORTSERVER_VARIABLE):
        candidates = _port_server()
    else:
        candidates = iter([0])
    for candidate in candidates:
        try:
            socket.bind(f"{host}:{candidate or '*'}")
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise TransportError(f"zmq could not listen on {host}:{candidate}: {error}") from error
        return _advertised(socket, options)
    raise TransportError(f"zmq could not listen: {_exhausted(endpoint, options)}")


def any_port(endpoint: str) -> str:
    """Return an endpoint on the same interface with any free port."""
    return f"{endpoint.rpartition(':')[0]}:*"


def _advertised(socket: Socket, options: ZmqOptions) -> str:
    bound = socket.get_string(zmq.LAST_ENDPOINT)
    if options.advertise is None:
        return bound
    return options.advertise.replace("{port}", bound.rpartition(":")[2])


def _range(low: int, high: int) -> Iterator[int]:
    """Return every port of a range once, starting at a random one so that processes seldom try the same port."""
    start = random.randrange(high - low + 1)
    for step in range(high - low + 1):
        yield low + (start + step) % (high - low + 1)


def _port_server() -> Iterator[int]:
    import portpicker  # only if its server is used

    for _ in range(PORTSERVER_TRIES):
        port = portpicker.get_port_from_port_server(os.environ[PORTSERVER_VARIABLE])
        if port is None:
            raise TransportError(f"the port server of {PORTSERVER_VARIABLE} did not return a port")
        yield port


def _exhausted(endpoint: str, options: ZmqOptions) -> str:
    if not endpoint.endswith(":*"):
        return f"{endpoint} is in use"
    if options.ports is not None:
        return f"every port from {options.ports[0]} to {options.ports[1]} is in use; widen ports"
    return f"{PORTSERVER_TRIES} ports of the port server were in use"
