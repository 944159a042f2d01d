"""Reading the messages that wait in a socket, without blocking and without keeping the thread from other sockets."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

BURST_MESSAGES = 1000  # before other sockets have their turn
NOBLOCK = int(zmq.NOBLOCK)  # an enumeration costs more than the call that it is passed to


def received(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that have arrived, each with all of its parts, up to a bound."""
    for _ in range(BURST_MESSAGES):
        try:
            frames = socket.recv_multipart(NOBLOCK, copy=False)
        except zmq.Again:
            return
        yield frames
