"""Questions that we ask: one ROUTER socket connected to the nodes that were asked.

A question goes to one of the nodes that say they answer for its key, chosen at random; to ourselves only where there is
nobody else. Its replies arrive in order and numbered. It ends, always: with the answerer's end, when the answerer is
gone, or when its time is over. A node that cannot be connected to is passed over for the next one.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable

import zmq

from zbus.observe.counters import Counts
from zbus.observe.records import EVENT_DROPPED, FABRIC_INPUT_REFUSED
from zbus.ports.log import Heard
from zbus_zmq.find.discovery import Node, Nodes
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.links import Links

BURST = 1000
ASKED_MAX = 10_000
ID_BYTES = 8
TICK_S = 0.05
NOBODY_THERE = (
    zmq.EVENT_CONNECT_RETRIED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)
Socket = zmq.Socket[bytes]


class Asked:
    """One question under way."""

    def __init__(self, key: str, payload: bytes, heard: Heard, deadline: float, ident: bytes) -> None:
        self.key, self.payload, self.deadline, self.ident = key, payload, deadline, ident
        self._heard = heard
        self._lock = threading.Lock()
        self._over = False
        self.node: Node | None = None
        self.route = b""  # to that node
        self.tried: set[str] = set()
        self.replies = 0
        self.cancel: Callable[[], None] = lambda: None

    def hear(self, data: bytes) -> None:
        """Pass on a reply. Replies that arrive after `close` are counted too, until the request is cancelled."""
        self.replies += 1
        if not self._over:
            self._heard(data)

    def end(self) -> None:
        """No more will come. Once."""
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self._heard(None)

    def close(self) -> None:
        """Listen no longer."""
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self.cancel()


class Asking:
    """The asking end, on the I/O thread; `ask` and `hear_of` are posted to it."""

    def __init__(self, io: IoThread, socket: Socket, links: Links, own: str, counts: Counts) -> None:
        self._io, self._socket, self._links, self._own, self._counts = io, socket, links, own, counts
        self._open: dict[bytes, Asked] = {}
        self._nodes: Nodes = {}
        self._connected: dict[str, str] = {}  # endpoint -> node
        self._routes: dict[str, bytes] = {}  # endpoint -> what the socket knows it by
        self._serial = itertools.count()
        self._ticking = False
        socket.set(zmq.ROUTER_MANDATORY, 1)

    def hear_of(self, nodes: Nodes) -> None:
        """The nodes that live now: questions to any other are over."""
        self._nodes = nodes
        for asked in [each for each in self._open.values() if each.node is not None and each.node.node not in nodes]:
            self._end(asked)
        for endpoint in [endpoint for endpoint, node in self._connected.items() if node not in nodes]:
            self._disconnect(endpoint)

    def ask(self, asked: Asked) -> None:
        """Ask one of those who answer for the key, or end at once."""
        if len(self._open) >= ASKED_MAX:
            self._counts.tell(EVENT_DROPPED, "too_many_questions", asked.key)
            asked.end()
            return
        self._open[asked.ident] = asked
        asked.cancel = lambda: self._io.post(lambda: self._cancel(asked))
        if not self._ticking:
            self._ticking = True
            self._io.later(TICK_S, self._tick)
        self._try_next(asked)

    def on_readable(self) -> None:
        """Take replies."""
        for _ in range(BURST):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            asked = self._open.get(parts[2]) if len(parts) >= 3 else None
            if len(parts) not in (3, 4, 5) or parts[1] not in (b"R", b"E", b"N"):
                self._counts.tell(FABRIC_INPUT_REFUSED, "reply_invalid", _node_of(parts[0]))
            elif asked is None or asked.node is None or asked.route != parts[0]:
                self._counts.note("reply_late")
            elif parts[1] == b"N" and len(parts) == 3:
                self._try_next(asked)
            elif parts[1] == b"R" and len(parts) == 5 and int.from_bytes(parts[3]) == asked.replies:
                asked.hear(parts[4])
            elif parts[1] == b"E" and len(parts) == 4 and int.from_bytes(parts[3]) == asked.replies:
                self._end(asked)
            else:
                self._counts.tell(FABRIC_INPUT_REFUSED, "reply_out_of_order", _node_of(parts[0]))
                self._cancel(asked)  # or the other node would go on replying
                asked.end()

    def happened(self, event: int, endpoint: str) -> None:
        """Something befell a connection."""
        node = self._connected.get(endpoint)
        if node is None:
            return
        if event == zmq.EVENT_DISCONNECTED:
            for asked in self._asked_of(node):
                self._end(asked)
        elif event in NOBODY_THERE:
            # The question was not delivered, and must not be later, so another may take it.
            self._disconnect(endpoint)
            for asked in self._asked_of(node):
                self._try_next(asked)

    def end_all(self) -> None:
        """The fabric closes."""
        for asked in list(self._open.values()):
            self._end(asked)

    def _asked_of(self, node: str) -> list[Asked]:
        return [each for each in self._open.values() if each.node is not None and each.node.node == node]

    def _try_next(self, asked: Asked) -> None:
        found = [node for node in self._nodes.values() if asked.key in node.answers and node.node not in asked.tried]
        others = [node for node in found if node.node != self._own]
        for node in random.sample(others, len(others)) or found:
            asked.tried.add(node.node)
            if self._send(asked, node):
                return
        self._end(asked)

    def _send(self, asked: Asked, node: Node) -> bool:
        if self._connected.get(node.questions) != node.node:
            self._disconnect(node.questions)  # another node had that port before
            # A new one each time: a connection that was dropped goes on for a moment, and libzmq aborts the process
            # when a second one is to be known by the same bytes.
            route = f"{node.node}/{next(self._serial)}".encode()
            if not self._links.connect(node.questions, node.curve_key, route):
                return False
            self._connected[node.questions], self._routes[node.questions] = node.node, route
        route = self._routes[node.questions]
        try:
            parts = [route, b"Q", asked.ident, asked.key.encode(), asked.payload]
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # full, or not there
            self._counts.tell("ASK_FAILED", "ask_failed", node.questions, detail=str(error))
            return False
        asked.node, asked.route = node, route
        return True

    def _cancel(self, asked: Asked) -> None:
        if self._open.pop(asked.ident, None) is not None and asked.node is not None:
            try:
                self._socket.send_multipart([asked.route, b"C", asked.ident], zmq.NOBLOCK)
            except zmq.ZMQError:  # the answerer finds out when it replies
                self._counts.note("cancel_dropped")

    def _end(self, asked: Asked) -> None:
        self._open.pop(asked.ident, None)
        asked.end()

    def _disconnect(self, endpoint: str) -> None:
        if self._connected.pop(endpoint, None) is not None:
            del self._routes[endpoint]
            self._links.drop(endpoint)

    def _tick(self) -> None:
        now = time.monotonic()
        for asked in [each for each in self._open.values() if each.deadline <= now]:
            self._cancel(asked)
            asked.end()
        self._ticking = bool(self._open)
        if self._ticking:
            self._io.later(TICK_S, self._tick)


def _node_of(route: bytes) -> str:
    return route.partition(b"/")[0].decode("ascii", "replace")
