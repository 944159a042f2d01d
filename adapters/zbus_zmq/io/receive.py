"""Reading the messages that wait in a socket, without blocking and without keeping the thread from other sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import zmq

BURST_MESSAGES = 1000  # before other sockets get their turn
NOBLOCK = int(zmq.NOBLOCK)  # an enumeration costs more than the call that it is passed to

Recv = Callable[[int, bool], zmq.Frame]


def received(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that have arrived, each with all of its parts, up to a bound."""
    # A `zmq.Frame` knows whether another one follows; `recv_multipart` asks the socket, which costs more.
    recv: Recv = socket.recv  # type: ignore[assignment]  # copy=False
    for _ in range(BURST_MESSAGES):
        try:
            last = recv(NOBLOCK, False)
        except zmq.Again:
            return
        frames = [last]
        while last.more:
            last = recv(NOBLOCK, False)
            frames.append(last)
        yield frames
