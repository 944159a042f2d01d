"""Sending without losing silently: a full subscriber holds up the rest for a while, then misses messages, counted.

An XPUB drops for a subscriber whose queue is full, without a word. With XPUB_NODROP it refuses the message instead.
The message is then tried again until the subscriber has room, or until nothing has moved for `stall_s`; from then on
what finds the queue full goes to everybody else and is counted. Once nothing has been refused for a while, a full
queue holds up again. So no sender waits for ever, and what is missing is known: the publisher's log has it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from .counts import Counts

RECOVERED_S = 1.0
MORE = int(zmq.SNDMORE) | int(zmq.NOBLOCK)
LAST = int(zmq.NOBLOCK)


class PacedSender:
    """An XPUB socket, on the thread that owns it."""

    def __init__(self, socket: zmq.Socket[bytes], stall_s: float, counts: Counts, source: str) -> None:
        self._socket, self._stall_s, self._counts, self._source = socket, stall_s, counts, source
        self._full_since: float | None = None
        self._stuck = False
        self._refused_at = 0.0
        socket.set(zmq.XPUB_NODROP, 1)

    def refused(self, parts: Sequence[bytes]) -> bool:
        """The socket refused this message. Whether it is done with all the same; if not, try it again soon."""
        now = time.monotonic()
        if self._stuck and now - self._refused_at > RECOVERED_S:
            self._stuck, self._full_since = False, None
        self._refused_at = now
        if self._full_since is None:
            self._full_since = now
        if not self._stuck and now - self._full_since < self._stall_s:
            return False
        self._stuck = True
        self._send_to_the_others(parts)
        return True

    def moved(self) -> None:
        """A message that had been refused has gone: the subscriber is slow, not stuck."""
        self._full_since = None

    def _send_to_the_others(self, parts: Sequence[bytes]) -> None:
        self._socket.set(zmq.XPUB_NODROP, 0)
        try:
            for part in parts[:-1]:
                self._socket.send(part, MORE)
            self._socket.send(parts[-1], LAST)
        finally:
            self._socket.set(zmq.XPUB_NODROP, 1)
        self._counts.dropped("subscriber_stuck", self._source)
