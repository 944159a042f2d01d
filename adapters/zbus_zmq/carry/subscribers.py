"""The subscriptions to this node's events, as the XPUB socket receives them.

A prefix says that some node subscribes to topics that begin with it; libzmq does not say which node. A mark (see
topics) belongs to one node: it says that the node is connected and that the subscriptions it made before have arrived.
Each mark is acknowledged with a message on the mark itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import zmq

from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus_zmq.address.topics import MARK, mark_of, node_of
from zbus_zmq.io.receive import received
from zbus_zmq.io.source import source_of

KEPT_MAX = 100_000
KEPT_BYTES_MAX = 16 * 1024 * 1024  # of all prefixes


class Subscribers:
    """The subscriptions, on the I/O thread; any thread may call `wants`. Without a node name, marks are prefixes."""

    def __init__(self, socket: zmq.Socket[bytes], node: str, counts: Counters) -> None:
        self._socket, self._node, self._counts = socket, node, counts
        self._prefixes: set[bytes] = set()
        self._prefix_bytes = 0
        self._turns: dict[str, set[int]] = {}  # the marks of each node
        self.wanted: frozenset[bytes] = frozenset()
        self.seen: Callable[[str], None] = lambda node: None  # a node has a new mark, or is gone

    @property
    def nodes(self) -> set[str]:
        """The nodes that are connected."""
        return set(self._turns)

    def wants(self, topic: bytes) -> bool:
        """Return whether a subscription matches a topic."""
        wanted = self.wanted
        return bool(wanted and topic) and any(topic.startswith(prefix) for prefix in wanted)

    def marks(self) -> Iterator[tuple[str, bytes]]:
        """Yield each node with its newest mark."""
        return ((node, mark_of(node, max(turns))) for node, turns in self._turns.items())

    def on_readable(self) -> None:
        """Receive subscriptions, and acknowledge marks."""
        arrived: list[bytes] = []
        for frame, *more in received(self._socket):
            message = frame.bytes
            if more or message[:1] not in (b"\0", b"\1"):
                self._refuse(frame)
            elif self._node and message[1:2] == bytes([MARK]):
                if self._take_mark(frame):
                    arrived.append(message[1:])
            elif not self._take_prefix(message[1:], message[0] == 1):
                self._refuse(frame)
        self.wanted = frozenset(self._prefixes)
        for mark in arrived:  # from now on the subscriber can rely on `wants`
            self._acknowledge(mark)

    def _take_prefix(self, prefix: bytes, subscribed: bool) -> bool:
        """Add or remove a prefix; return whether there is room for it."""
        if (prefix in self._prefixes) is subscribed:
            return True
        size = len(prefix) if subscribed else -len(prefix)
        full = len(self._prefixes) >= KEPT_MAX or self._prefix_bytes + size > KEPT_BYTES_MAX
        if subscribed and full:
            return False
        self._prefix_bytes += size
        (self._prefixes.add if subscribed else self._prefixes.remove)(prefix)
        return True

    def _take_mark(self, frame: zmq.Frame) -> bool:
        """Add or remove a mark; return whether it needs an acknowledgement."""
        found = node_of(frame.bytes[1:])
        if found is None or len(self._turns) >= KEPT_MAX:
            self._refuse(frame)
            return False
        (node, turn), subscribed = found, frame.bytes[0] == 1
        turns = self._turns.setdefault(node, set())
        if subscribed:
            turns.add(turn)
        else:
            turns.discard(turn)
        if not turns:
            del self._turns[node]
        if subscribed or not turns:
            self.seen(node)
        return subscribed

    def _refuse(self, frame: zmq.Frame) -> None:
        self._counts.report(TRANSPORT_INPUT_REJECTED, "subscription_invalid", source_of(frame, "a subscriber"))

    def _acknowledge(self, mark: bytes) -> None:
        try:
            self._socket.send_multipart([mark, self._node.encode()], zmq.NOBLOCK)
        except zmq.Again:
            self._counts.add("acknowledgement_dropped")
