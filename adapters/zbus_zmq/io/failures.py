"""Conversion of libzmq's errors to `TransportError`, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from zbus.errors import TransportError


@contextmanager
def zmq_errors(doing: str) -> Iterator[None]:
    """Raise errors of libzmq in the `with` block as `TransportError`."""
    try:
        yield
    except zmq.ZMQError as error:
        raise TransportError(f"zmq could not {doing}: {error}") from error
