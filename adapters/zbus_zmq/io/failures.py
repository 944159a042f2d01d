"""Every error of libzmq becomes one of ours, here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from zbus.errors import TransportError


@contextmanager
def zmq_errors(doing: str) -> Iterator[None]:
    """Turn what libzmq raises while `doing` something into `TransportError`."""
    try:
        yield
    except zmq.ZMQError as error:
        raise TransportError(f"zmq could not {doing}: {error}") from error
