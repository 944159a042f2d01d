"""Sending with counted losses: a full subscriber blocks the others for a while, then misses messages.

An XPUB silently drops messages for a subscriber whose queue is full. With XPUB_NODROP it refuses the message instead.
The message is then tried again until the subscriber has capacity, or until nothing has moved for `stall_s` seconds.
Then it goes to all other subscribers. From there on libzmq skips the stalled subscriber until it has read half of its
queue, without reporting it. To find the node, a message is sent on each node's mark: it is refused if the queue of that
node is full. While a node is stalled, messages are counted, and a probe on its mark asks it for a new mark as a sign
that it receives again. So no sender waits forever, and missing messages are known; the publisher's log has them.
libzmq's heartbeats disconnect a frozen or unreachable peer after some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import zmq

from zbus.observe.counters import Counters
from zbus.observe.records import EVENT_DROPPED

from .io_thread import IoThread

PROBE_S = 0.25
PROBE = b"?"
MORE = int(zmq.SNDMORE) | int(zmq.NOBLOCK)
LAST = int(zmq.NOBLOCK)

Marks = Callable[[], Iterable[tuple[str, bytes]]]  # the nodes that subscribe, each with its mark


def quick_send(socket: zmq.Socket[bytes]) -> Callable[[bytes, int], object]:
    """Return `socket.send` without pyzmq's wrapper for other kinds of sockets: it takes a third of the time."""
    send: Callable[[bytes, int], object] = super(zmq.Socket, socket).send
    return send


class PacedSender:
    """An XPUB socket, on the thread that owns it. `sender` acknowledges marks; a broker does not."""

    def __init__(
        self, io: IoThread, socket: zmq.Socket[bytes], stall_s: float, counts: Counters, sender: bytes, marks: Marks
    ) -> None:
        self._io, self._socket, self._stall_s, self._counts = io, socket, stall_s, counts
        self._sender, self._marks = sender, marks
        self._full_since: float | None = None
        self._probing = False
        self.stuck: set[str] = set()
        socket.set(zmq.XPUB_NODROP, 1)

    def refused(self, parts: Sequence[bytes]) -> bool:
        """React to a message that the socket refused. Return whether it was sent anyway; if not, try it again soon."""
        now = time.monotonic()
        if self._full_since is None:
            self._full_since = now
        if now - self._full_since < self._stall_s:
            return False
        self._full_since = None
        self._find_stuck()
        self._socket.set(zmq.XPUB_NODROP, 0)
        try:
            self._send(parts)
        finally:
            self._socket.set(zmq.XPUB_NODROP, 1)
        self._counts.report(EVENT_DROPPED, "subscriber_stuck", ", ".join(sorted(self.stuck)) or "a subscriber")
        return True

    def moved(self, messages: int) -> None:
        """Note that messages were sent since the last call, possibly after one of them had been refused."""
        self._full_since = None
        if self.stuck:
            self._counts.add("dropped_slow_subscriber", messages)

    def released(self, node: str) -> None:
        """Remove a node that receives again, or is gone."""
        self.stuck.discard(node)

    def _find_stuck(self) -> None:
        for node, mark in self._marks():
            try:
                self._send((mark, self._sender))
            except zmq.Again:
                self.stuck.add(node)
        if self.stuck and not self._probing:
            self._probing = True
            self._io.later(PROBE_S, self._probe)

    def _probe(self) -> None:
        known = dict(self._marks())
        self.stuck &= known.keys()
        for node in self.stuck:
            try:
                self._send((known[node], self._sender, PROBE))
            except zmq.Again:  # full once more
                continue
        self._probing = bool(self.stuck)
        if self._probing:
            self._io.later(PROBE_S, self._probe)

    def _send(self, parts: Sequence[bytes]) -> None:
        for part in parts[:-1]:
            self._socket.send(part, MORE)
        self._socket.send(parts[-1], LAST)
