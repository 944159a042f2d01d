"""How every ZMQ socket of this profile is set up and read, and what becomes of ZMQ's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from zbus.errors import FabricError

HIGH_WATER = 100_000
LINGER_MS = 1000
HEARTBEAT_MS = 2000
BURST = 1000


def make_socket(context: Any, kind: int, message_bytes_max: int = -1) -> Any:
    """A socket with the settings that all of ours have."""
    made = context.socket(kind)
    made.linger = LINGER_MS
    made.sndhwm = made.rcvhwm = HIGH_WATER
    made.ipv6 = True
    made.maxmsgsize = message_bytes_max
    made.heartbeat_ivl, made.heartbeat_timeout = HEARTBEAT_MS, 3 * HEARTBEAT_MS
    made.reconnect_ivl, made.reconnect_ivl_max = 50, 2000
    return made


def received(socket_: Any) -> Iterator[list[bytes]]:
    """The messages that are there, up to a burst."""
    for _ in range(BURST):
        try:
            yield socket_.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


@contextmanager
def zmq_errors(doing: str) -> Iterator[None]:
    """ZMQ's errors become ours, here and nowhere else."""
    try:
        yield
    except zmq.ZMQError as error:
        raise FabricError(f"zmq could not {doing}: {error}") from error
