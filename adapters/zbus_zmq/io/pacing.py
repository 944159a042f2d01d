"""Sending without losing silently: a full subscriber holds up the rest for a while, then misses messages, counted.

An XPUB drops for a subscriber whose queue is full, without a word. With XPUB_NODROP it refuses the message instead.
The message is then tried again until the subscriber has room, or until nothing has moved for `stall_s`. Then it goes to
everybody else; libzmq leaves the stuck subscriber out from there on, until that has read half of its queue, and says
nothing. So we find out who it is: a message on a node's own mark is refused if that node's queue is full. As long as a
node is stuck, what is sent is counted, and the node is asked by a probe on its mark to show that it receives again, by
a new mark. So no sender waits for ever, and what may be missing is known: the publisher's log has it. A peer that is
frozen or cut off is disconnected by libzmq's heartbeats after some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import zmq

from zbus.observe.counters import Counts
from zbus.observe.records import EVENT_DROPPED

from .io_thread import IoThread

PROBE_S = 0.25
PROBE = b"?"
MORE = int(zmq.SNDMORE) | int(zmq.NOBLOCK)
LAST = int(zmq.NOBLOCK)

Marks = Callable[[], Iterable[tuple[str, bytes]]]  # the nodes that subscribe, each with its mark


def quick_send(socket: zmq.Socket[bytes]) -> Callable[[bytes, int], object]:
    """`socket.send` without what pyzmq's wrapper adds for kinds of sockets that we do not use: a third of the time."""
    send: Callable[[bytes, int], object] = super(zmq.Socket, socket).send
    return send


class PacedSender:
    """An XPUB socket, on the thread that owns it. `sender` is who acknowledges marks; a broker does not."""

    def __init__(
        self, io: IoThread, socket: zmq.Socket[bytes], stall_s: float, counts: Counts, sender: bytes, marks: Marks
    ) -> None:
        self._io, self._socket, self._stall_s, self._counts = io, socket, stall_s, counts
        self._sender, self._marks = sender, marks
        self._full_since: float | None = None
        self._probing = False
        self.stuck: set[str] = set()
        socket.set(zmq.XPUB_NODROP, 1)

    def refused(self, parts: Sequence[bytes]) -> bool:
        """The socket refused this message. Whether it is done with all the same; if not, try it again soon."""
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
        self._counts.tell(EVENT_DROPPED, "subscriber_stuck", ", ".join(sorted(self.stuck)) or "a subscriber")
        return True

    def moved(self, messages: int) -> None:
        """So many messages have gone since the last call, one of them perhaps after it had been refused."""
        self._full_since = None
        if self.stuck:
            self._counts.note("past_stuck_subscriber", messages)

    def released(self, node: str) -> None:
        """A node has shown that it receives, or is gone."""
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
