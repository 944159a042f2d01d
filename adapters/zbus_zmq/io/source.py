"""Who sent a message, for a report of what was wrong with it.

libzmq tells the address of the other end but not its port, by which two programs of one host differ; the connection's
file descriptor, which it tells as well, knows both. It is asked only for what is reported, and may be closed by then.
"""

from __future__ import annotations

import os
import socket

import zmq


def source_of(frame: zmq.Frame, fallback: str) -> str:
    """The other end of the connection that a part of a message came by, such as `127.0.0.1:5555`."""
    try:
        host = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return fallback
    try:
        with socket.socket(fileno=os.dup(int(frame.get(zmq.SRCFD)))) as connection:
            return f"{host}:{connection.getpeername()[1]}"
    except (OSError, zmq.ZMQError):  # gone
        return host
