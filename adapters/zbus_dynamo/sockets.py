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

# As plain numbers: an enumeration costs more than the call that it is passed to.
_NOW, _NOW_AND_MORE, _MORE_COMES = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.RCVMORE)


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
            message = [socket_.recv(_NOW)]
        except zmq.Again:
            return
        while socket_.getsockopt(_MORE_COMES):
            message.append(socket_.recv(_NOW))
        yield message


def send_now(socket_: Any, message: list[bytes]) -> None:
    """Send a message, or raise `zmq.Again`: only its first frame can, so it goes whole or not at all."""
    for frame in message[:-1]:
        socket_.send(frame, _NOW_AND_MORE)
    socket_.send(message[-1], _NOW)


@contextmanager
def zmq_errors(doing: str) -> Iterator[None]:
    """ZMQ's errors become ours, here and nowhere else."""
    try:
        yield
    except zmq.ZMQError as error:
        raise FabricError(f"zmq could not {doing}: {error}") from error
