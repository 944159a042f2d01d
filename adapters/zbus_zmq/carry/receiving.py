"""Receiving: one SUB socket that is connected to every publisher, or to every broker.

libzmq filters coarsely, by prefix; the exact filter is here, with its results kept by topic. Through several brokers, a
message arrives once from each, and this node's own messages come back: each carries a stamp, and duplicates and own
messages are dropped. A malformed message is counted and read to its end, so that the next one is read correctly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

import zmq

from zbus.keys import KeySet
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import Receive
from zbus.util.memo import Memo
from zbus.util.window import Window
from zbus_zmq.address.topics import MARK, key_of, mark_of, node_of, prefix_of, widest
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.pacing import PROBE
from zbus_zmq.io.receive import BURST_MESSAGES, NOBLOCK, Recv
from zbus_zmq.io.source import source_of
from zbus_zmq.io.stamps import SEEN_MAX, SENDER_BYTES, STAMP_BYTES

TOPICS_MAX = 10_000
SENDERS_MAX = 10_000
PARTS_MAX = 64  # of a malformed message; further parts are read and discarded
NOTES: tuple[list[bytes], ...] = ([], [PROBE])  # what may follow the sender in a message on our mark


class ZmqReceiving:
    """Receives events. `listen` and `acknowledged` may be called on any thread, the rest on the I/O thread."""

    def __init__(self, io: IoThread, socket: zmq.Socket[bytes], node: str, counts: Counters, *, brokers: int) -> None:
        """`brokers`: the number of brokers that messages come from, or 0 if there are none."""
        self._io, self._socket, self._node, self._counts = io, socket, node, counts
        self._recv: Recv = socket.recv  # type: ignore[assignment]  # copy=False
        self._stamped, self._own = brokers > 0, bytes.fromhex(node)
        self._seen = Window[bytes](SEEN_MAX) if brokers > 1 else None  # one broker delivers nothing twice
        self._receive: Receive | None = None
        self._keys: KeySet | None = None
        self._known: Memo[bytes, bool] = Memo(TOPICS_MAX)
        self._prefixes: set[bytes] = set()
        self._turn = 0
        self._acknowledged: Memo[str, int] = Memo(SENDERS_MAX)  # by publishing node, the last turn that it acknowledged
        self._news = threading.Condition()
        socket.set(zmq.SUBSCRIBE, mark_of(node, 0))

    # any thread

    def listen(self, expressions: Sequence[str], receive: Receive) -> int:
        """Receive matching events from now on. Return the turn that publishers acknowledge."""
        keys = KeySet(expressions) if expressions else None
        prefixes = widest(prefix_of(each) for each in keys.expressions) if keys is not None else set()
        return self._io.call("subscribe", lambda: self._change(keys, prefixes, receive))

    def acknowledged(self, turn: int, nodes: Iterable[str], within_s: float) -> set[str]:
        """Wait until these publishers acknowledged a turn, for at most a while. Return those that did not."""
        waiting = set(nodes)
        deadline = time.monotonic() + within_s
        with self._news:
            while True:
                waiting = {node for node in waiting if self._acknowledged.get(node, -1) < turn}
                left = deadline - time.monotonic()
                if not waiting or left <= 0:
                    return waiting
                self._news.wait(left)

    # the I/O thread

    def forget(self, nodes: Iterable[str]) -> None:
        """Forget publishers that are gone."""
        with self._news:
            for node in nodes:
                self._acknowledged.pop(node, None)

    def on_readable(self) -> None:
        """Hand over the messages that have arrived, up to a bound."""
        try:
            self._take_stamped() if self._stamped else self._take()
        except zmq.Again:
            pass

    def _change(self, keys: KeySet | None, prefixes: set[bytes], receive: Receive) -> int:
        self._keys, self._receive = keys, receive
        self._known.clear()
        before, self._prefixes = self._prefixes, prefixes
        for prefix in prefixes - before:
            self._socket.set(zmq.SUBSCRIBE, prefix)
        self._renew_mark()
        for prefix in before - prefixes:
            self._socket.set(zmq.UNSUBSCRIBE, prefix)
        return self._turn

    def _renew_mark(self) -> None:
        self._turn += 1
        self._socket.set(zmq.SUBSCRIBE, mark_of(self._node, self._turn))
        self._socket.set(zmq.UNSUBSCRIBE, mark_of(self._node, self._turn - 1))

    def _take(self) -> None:
        # A `zmq.Frame` knows whether another one follows; asking the socket costs more than everything else.
        recv, known, receive = self._recv, self._known, self._receive
        for _ in range(BURST_MESSAGES):
            head = recv(NOBLOCK, False)
            wanted = known.get(head.bytes)
            if wanted is None or receive is None:
                self._take_unfamiliar(head)
                continue
            if not head.more:
                self._refuse("invalid_frame_count", head)
                continue
            body = recv(NOBLOCK, False)
            if body.more:
                self._rest(body)
                self._refuse("invalid_frame_count", head)
            elif wanted:
                receive(body.bytes, None)

    def _take_stamped(self) -> None:
        recv, known, receive = self._recv, self._known, self._receive
        for _ in range(BURST_MESSAGES):
            head = recv(NOBLOCK, False)
            wanted = known.get(head.bytes)
            if wanted is None or receive is None:
                self._take_unfamiliar(head)
                continue
            parts = self._rest(head)
            if len(parts) != 2 or len(parts[0]) != STAMP_BYTES:
                self._refuse("invalid_frame_count" if len(parts) != 2 else "invalid_stamp", head)
            elif wanted and self._is_new(parts[0]):
                receive(parts[1], None)

    def _take_unfamiliar(self, head: zmq.Frame) -> None:
        """Receive a message whose topic is new. This is the slow path."""
        topic, parts = head.bytes, self._rest(head)
        if topic[:1] == bytes([MARK]):
            self._take_mark(head, parts)
            return
        key = key_of(topic)
        if key is None:
            self._refuse("invalid_topic", head)
            return
        wanted = self._known[topic] = self._keys is not None and key in self._keys
        if len(parts) != (2 if self._stamped else 1):
            self._refuse("invalid_frame_count", head)
        elif self._stamped and len(parts[0]) != STAMP_BYTES:
            self._refuse("invalid_stamp", head)
        elif wanted and self._receive is not None and (not self._stamped or self._is_new(parts[0])):
            self._receive(parts[-1], None)

    def _take_mark(self, mark: zmq.Frame, parts: list[bytes]) -> None:
        found = node_of(mark.bytes)
        valid = found is not None and found[0] == self._node and parts and len(parts[0]) <= 64 and parts[1:] in NOTES
        if found is None or not valid or not (parts[0] == b"" or parts[0].isalnum()):
            self._refuse("invalid_mark", mark)
            return
        if parts[1:] == [PROBE] and found[1] == self._turn:
            self._renew_mark()  # a publisher probes whether this node receives again
        publisher = parts[0].decode("ascii", "replace")
        with self._news:
            self._acknowledged[publisher] = max(found[1], self._acknowledged.get(publisher, -1))
            self._news.notify_all()

    def _is_new(self, stamp: bytes) -> bool:
        """Return whether a message is neither our own nor already received through another broker."""
        if stamp[:SENDER_BYTES] == self._own:
            return False
        if self._seen is None or not self._seen.seen(stamp):
            return True
        self._counts.add("duplicate")
        return False

    def _refuse(self, code: str, head: zmq.Frame) -> None:
        """Count a malformed message. A broker hides its sender, so the topic is reported as well if it is valid."""
        source = source_of(head, "a publisher")
        if self._stamped and (key := key_of(head.bytes)) is not None:
            source = f"{key} through {source}"
        self._counts.report(TRANSPORT_INPUT_REJECTED, code, source)

    def _rest(self, last: zmq.Frame) -> list[bytes]:
        """Read the parts that follow `last`, and return at most `PARTS_MAX` of them."""
        parts: list[bytes] = []
        while last.more:
            last = self._recv(NOBLOCK, False)
            if len(parts) < PARTS_MAX:
                parts.append(last.bytes)
        return parts
