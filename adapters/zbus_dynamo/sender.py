"""A publishing socket that knows who listens, and that never drops a message without counting it.

An ordinary PUB socket throws messages away beyond its high-water mark and tells nobody. An XPUB socket, the
same on the wire, can be told to refuse instead: we wait a moment for the slow subscriber, then let the message
pass him by, and count it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import zmq

from zbus.observe.counters import Counts
from zbus.observe.records import EVENT_DROPPED

from .sockets import make_socket, received, send_now
from .zmq_loop import ZmqLoop

PATIENCE_S = 1.0  # how long a full subscriber may hold up the others
LOSSY_S = 5.0  # and how long it is not waited for again


class Sender:
    """Lives on the loop's thread; `subscriptions` may be read anywhere."""

    def __init__(self, loop: ZmqLoop, counts: Counts, name: str) -> None:
        self.socket: Any = make_socket(loop.context, zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        self.subscriptions: frozenset[bytes] = frozenset()
        self.queue: deque[tuple[list[bytes], int]] = deque()  # frames, and the size that was accounted for
        self._loop, self._counts, self._name = loop, counts, name
        self._full_since: float | None = None
        self._lossy_until = 0.0
        loop.watch(self.socket, self._heard)

    def wanted(self, topic: bytes) -> bool:
        """Whether somebody subscribed to a prefix of this topic."""
        return any(topic.startswith(prefix) for prefix in self.subscriptions)

    def flush(self, now: float) -> tuple[int, int]:
        """Send until the queue is empty or a subscriber is full: how many events and bytes went."""
        events = size = 0
        while self.queue:
            frames, length = self.queue[0]
            if not self._send(frames, now):
                break
            self.queue.popleft()
            events, size = events + 1, size + length
        return events, size

    def close(self) -> None:
        """Close; ZMQ still delivers, in the background, what it was given."""
        self._loop.unwatch(self.socket)
        self.socket.close()

    def _send(self, frames: list[bytes], now: float) -> bool:
        try:
            send_now(self.socket, frames)
            self._full_since = None
            return True
        except zmq.Again:
            pass
        if now >= self._lossy_until:
            self._full_since = self._full_since or now
            if now - self._full_since < PATIENCE_S:
                return False
        self._full_since, self._lossy_until = None, time.monotonic() + LOSSY_S
        self.socket.setsockopt(zmq.XPUB_NODROP, 0)
        try:
            send_now(self.socket, frames)
        finally:
            self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._counts.tell(EVENT_DROPPED, "dropped_slow_subscriber", self._name, detail="a subscriber does not keep up")
        return True

    def _heard(self) -> None:
        for message in received(self.socket):
            head, topic = message[0][:1], message[0][1:]
            if head == b"\x01":
                self.subscriptions |= {topic}
            elif head == b"\x00":
                self.subscriptions -= {topic}
