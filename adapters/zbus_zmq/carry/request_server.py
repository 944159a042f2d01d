"""Requests of other nodes: one ROUTER socket.

A request is [Q, id, key, payload]. Each reply is [R, id, number, data], and [E, id, count] ends the replies; [N, id]
says that this node does not serve the key. [C, id] from the client cancels a request. Replies wait in a bounded queue
of their request while the client's connection is full, so a slow client delays only its own replies.

Work queues, where one of several workers takes each item, would be a PUSH and a PULL socket beside this one, with their
endpoints in the node's announcement.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_INPUT_REJECTED
from zbus.ports.fabric import IncomingRequest
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.receive import received
from zbus_zmq.io.source import source_of

BURST = 1000  # replies sent before other sockets have their turn
QUEUE_REPLIES_MAX = 256
QUEUE_BYTES_MAX = 16 << 20
BLOCKED_S = 30.0  # after which a client that receives nothing is given up
RETRY_S = 0.005
OPEN_MAX = 10_000
ID_BYTES = 8

OnRequest = Callable[[IncomingRequest], None]
Socket = zmq.Socket[bytes]


class ZmqRequestServer:
    """Receives requests and sends replies. `serve` may be called on any thread, the rest on the I/O thread."""

    def __init__(self, io: IoThread, socket: Socket, counts: Counters) -> None:
        self._io, self._socket, self._counts = io, socket, counts
        self._keys: frozenset[str] = frozenset()
        self._on_request: OnRequest | None = None
        self._open: dict[tuple[bytes, bytes], ZmqIncomingRequest] = {}  # by client and id
        self._waiting: set[tuple[bytes, bytes]] = set()
        self._retrying = False
        socket.set(zmq.ROUTER_MANDATORY, 1)

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        """Accept requests for these keys from now on."""
        self._keys, self._on_request = frozenset(keys), on_request

    def on_readable(self) -> None:
        """Receive requests and cancellations, up to a bound."""
        for frames in received(self._socket):
            route, *parts = [frame.bytes for frame in frames]
            if len(parts) == 4 and parts[0] == b"Q" and len(parts[1]) == ID_BYTES:
                self._take(frames[-1], route, parts[1], parts[2], parts[3])
            elif len(parts) == 2 and parts[0] == b"C" and len(parts[1]) == ID_BYTES:
                self.end((route, parts[1]))
            else:
                self._counts.report(TRANSPORT_INPUT_REJECTED, "request_invalid", source_of(frames[-1], "a client"))

    def end(self, name: tuple[bytes, bytes]) -> None:
        """Forget a request. Its handler gets an error when it replies."""
        self._waiting.discard(name)
        request = self._open.pop(name, None)
        if request is not None:
            request.give_up("the client no longer listens")

    def end_all(self) -> None:
        """Forget every request, because the fabric closes."""
        for name in list(self._open):
            self.end(name)

    def flush(self, name: tuple[bytes, bytes]) -> None:
        """Send the queued replies of a request, as far as its client receives them.

        A bounded number at a time: a handler that replies faster than the socket sends would otherwise keep this thread
        from everything else, including the cancellation of this request.
        """
        request = self._open.get(name)
        if request is None:
            return
        self._waiting.discard(name)
        for _ in range(BURST):
            if (parts := request.next_parts()) is None:
                break
            try:
                self._socket.send_multipart([name[0], *parts], zmq.NOBLOCK)
            except zmq.Again:
                self._waiting.add(name)
                if not self._retrying:
                    self._retrying = True
                    self._io.later(RETRY_S, self._flush_waiting)
                return
            except zmq.ZMQError as error:
                self._counts.report("REPLY_FAILED", "client_gone", "a client", detail=str(error))
                self.end(name)
                return
            request.sent()
        else:
            self._io.post(lambda: self.flush(name))
        if request.is_over():
            self._open.pop(name, None)

    def _flush_waiting(self) -> None:
        self._retrying = False
        for name in list(self._waiting):
            self.flush(name)

    def _take(self, frame: zmq.Frame, route: bytes, ident: bytes, raw_key: bytes, payload: bytes) -> None:
        try:
            key = raw_key.decode()
        except UnicodeDecodeError:
            self._counts.report(TRANSPORT_INPUT_REJECTED, "request_invalid", source_of(frame, "a client"))
            return
        name = route, ident
        if self._on_request is None or key not in self._keys or name in self._open or len(self._open) >= OPEN_MAX:
            self._reject(route, ident)
            return
        request = ZmqIncomingRequest(key, payload, ident, lambda: self._io.post(lambda: self.flush(name)))
        self._open[name] = request
        self._on_request(request)

    def _reject(self, route: bytes, ident: bytes) -> None:
        self._counts.add("request_rejected")
        try:
            self._socket.send_multipart([route, b"N", ident], zmq.NOBLOCK)
        except zmq.ZMQError:  # its queue is full, or it is gone: its timeout ends the request
            self._counts.add("rejection_dropped")


class ZmqIncomingRequest:
    """One request of another node. Replies are queued, up to a bound, and sent by the I/O thread."""

    def __init__(self, key: str, payload: bytes, ident: bytes, wake: Callable[[], None]) -> None:
        self.key, self.payload = key, payload
        self._ident, self._wake = ident, wake
        self._room = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._bytes = self._count = 0
        self._closed = self._ended = False
        self._woken = False  # a flush is due
        self._gone = ""

    def reply(self, data: bytes) -> None:
        """Queue one reply; block while the queue is full."""
        deadline = time.monotonic() + BLOCKED_S
        with self._room:
            while not self._gone and (len(self._queue) >= QUEUE_REPLIES_MAX or self._bytes >= QUEUE_BYTES_MAX):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransportError(
                        f"the client has received nothing for {BLOCKED_S:g} s; this reply was not sent"
                    )
                self._room.wait(left)
            if self._gone or self._closed:
                raise TransportError(f"this reply was not sent: {self._gone or 'the request is closed'}")
            self._queue.append(data)
            self._bytes += len(data)
            woken, self._woken = self._woken, True
        if not woken:
            self._wake()

    def close(self) -> None:
        """End the replies. Calling it again has no effect."""
        with self._room:
            if self._closed:
                return
            self._closed = True
            woken, self._woken = self._woken, True
        if not woken:
            self._wake()

    def next_parts(self) -> list[bytes] | None:
        """Return the next message without the route, or None. It stays queued until `sent` is called."""
        with self._room:
            if self._queue:
                return [b"R", self._ident, self._count.to_bytes(8), self._queue[0]]
            if self._closed and not self._ended:
                return [b"E", self._ident, self._count.to_bytes(8)]
            self._woken = False
            return None

    def sent(self) -> None:
        """Remove the message that `next_parts` returned."""
        with self._room:
            if self._queue:
                self._bytes -= len(self._queue.popleft())
                self._count += 1
                self._room.notify_all()
            else:
                self._ended = True

    def is_over(self) -> bool:
        """Return whether the end marker has been sent."""
        return self._ended

    def give_up(self, reason: str) -> None:
        """Drop the queued replies; later ones raise `TransportError` with this reason."""
        with self._room:
            self._gone = reason
            self._queue.clear()
            self._room.notify_all()
