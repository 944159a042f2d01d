"""The sender of a message, for reports about malformed messages.

libzmq knows the address of the peer but not its port, by which two programs on one host differ. The connection's file
descriptor, which libzmq also provides, knows both. It is only used for reports, and may be closed by then.
"""

from __future__ import annotations

import os
import socket

import zmq


def source_of(frame: zmq.Frame, fallback: str) -> str:
    """Return the address of the peer that sent a part of a message, such as `127.0.0.1:5555`."""
    try:
        host = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return fallback
    try:
        with socket.socket(fileno=os.dup(int(frame.get(zmq.SRCFD)))) as connection:
            return f"{host}:{connection.getpeername()[1]}"
    except (OSError, zmq.ZMQError):  # the connection is closed
        return host
