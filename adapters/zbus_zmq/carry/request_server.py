"""Questions that other nodes ask us: one ROUTER socket.

A question is [Q, id, key, payload]; each reply [R, id, number, data], and [E, id, count] ends them; [N, id] says that
we do not answer for the key. [C, id] from the asker says that it no longer listens. A reply waits in a bounded queue of
its question while the asker's connection is full, so one slow asker holds up its own replies alone.

Work queues, where one of several workers takes each item, would be a PUSH and a PULL socket beside this one, with their
endpoints in the node's announcement.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from zbus.errors import FabricError
from zbus.observe.counters import Counts
from zbus.observe.records import FABRIC_INPUT_REFUSED
from zbus.ports.fabric import Question
from zbus_zmq.io.io_thread import IoThread
from zbus_zmq.io.source import source_of

BURST = 1000  # messages taken or sent before others have their turn
QUEUE_REPLIES_MAX = 256
QUEUE_BYTES_MAX = 16 << 20
BLOCKED_S = 30.0  # an asker that takes nothing for so long is given up
RETRY_S = 0.005
QUESTIONS_MAX = 10_000
ID_BYTES = 8

Asked = Callable[[Question], None]
Socket = zmq.Socket[bytes]


class Answering:
    """The answering end. `answer` on any thread, the rest on the I/O thread."""

    def __init__(self, io: IoThread, socket: Socket, counts: Counts) -> None:
        self._io, self._socket, self._counts = io, socket, counts
        self._keys: frozenset[str] = frozenset()
        self._asked: Asked | None = None
        self._open: dict[tuple[bytes, bytes], IncomingQuestion] = {}  # by asker and id
        self._waiting: set[tuple[bytes, bytes]] = set()
        self._retrying = False
        socket.set(zmq.ROUTER_MANDATORY, 1)

    def answer(self, keys: Sequence[str], asked: Asked) -> None:
        """Take questions for these keys from now on."""
        self._keys, self._asked = frozenset(keys), asked

    def on_readable(self) -> None:
        """Take what was asked."""
        for _ in range(BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            route, *parts = [frame.bytes for frame in frames]
            if len(parts) == 4 and parts[0] == b"Q" and len(parts[1]) == ID_BYTES:
                self._take(frames[-1], route, parts[1], parts[2], parts[3])
            elif len(parts) == 2 and parts[0] == b"C" and len(parts[1]) == ID_BYTES:
                self.end((route, parts[1]))
            else:
                self._counts.tell(FABRIC_INPUT_REFUSED, "question_invalid", source_of(frames[-1], "an asker"))

    def end(self, name: tuple[bytes, bytes]) -> None:
        """A question is over, whoever ended it."""
        self._waiting.discard(name)
        question = self._open.pop(name, None)
        if question is not None:
            question.give_up("the asker no longer listens")

    def end_all(self) -> None:
        """The fabric closes."""
        for name in list(self._open):
            self.end(name)

    def flush(self, name: tuple[bytes, bytes]) -> None:
        """Send what a question has queued, as far as its asker takes it.

        A bounded number at a time: one that replies faster than we send would keep us from everything else, also from
        hearing that its asker no longer listens.
        """
        question = self._open.get(name)
        if question is None:
            return
        self._waiting.discard(name)
        for _ in range(BURST):
            if (parts := question.next_parts()) is None:
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
                self._counts.tell("ANSWER_FAILED", "asker_gone", "an asker", detail=str(error))
                self.end(name)
                return
            question.sent()
        else:
            self._io.post(lambda: self.flush(name))
        if question.is_over():
            self._open.pop(name, None)

    def _flush_waiting(self) -> None:
        self._retrying = False
        for name in list(self._waiting):
            self.flush(name)

    def _take(self, frame: zmq.Frame, route: bytes, ident: bytes, raw_key: bytes, payload: bytes) -> None:
        try:
            key = raw_key.decode()
        except UnicodeDecodeError:
            self._counts.tell(FABRIC_INPUT_REFUSED, "question_invalid", source_of(frame, "an asker"))
            return
        name = route, ident
        if self._asked is None or key not in self._keys or name in self._open or len(self._open) >= QUESTIONS_MAX:
            self._refuse(route, ident)
            return
        question = IncomingQuestion(key, payload, ident, lambda: self._io.post(lambda: self.flush(name)))
        self._open[name] = question
        self._asked(question)

    def _refuse(self, route: bytes, ident: bytes) -> None:
        self._counts.note("question_refused")
        try:
            self._socket.send_multipart([route, b"N", ident], zmq.NOBLOCK)
        except zmq.ZMQError:  # full or gone: it will hear of it by its timeout
            self._counts.note("refusal_dropped")


class IncomingQuestion:
    """One question. Replies are queued, up to a bound, and sent by the I/O thread."""

    def __init__(self, key: str, payload: bytes, ident: bytes, wake: Callable[[], None]) -> None:
        self.key, self.payload = key, payload
        self._ident, self._wake = ident, wake
        self._room = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._bytes = self._count = 0
        self._closed = self._ended = False
        self._woken = False  # it is going to be flushed
        self._gone = ""

    def reply(self, data: bytes) -> None:
        """Queue one reply; wait while the queue is full."""
        deadline = time.monotonic() + BLOCKED_S
        with self._room:
            while not self._gone and (len(self._queue) >= QUEUE_REPLIES_MAX or self._bytes >= QUEUE_BYTES_MAX):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise FabricError(f"the asker has taken nothing for {BLOCKED_S:g} s; this reply was not sent")
                self._room.wait(left)
            if self._gone or self._closed:
                raise FabricError(f"this reply was not sent: {self._gone or 'the question is closed'}")
            self._queue.append(data)
            self._bytes += len(data)
            woken, self._woken = self._woken, True
        if not woken:
            self._wake()

    def close(self) -> None:
        """End the replies."""
        with self._room:
            if self._closed:
                return
            self._closed = True
            woken, self._woken = self._woken, True
        if not woken:
            self._wake()

    def next_parts(self) -> list[bytes] | None:
        """What to send next, without the route; it stays queued until `sent`."""
        with self._room:
            if self._queue:
                return [b"R", self._ident, self._count.to_bytes(8), self._queue[0]]
            if self._closed and not self._ended:
                return [b"E", self._ident, self._count.to_bytes(8)]
            self._woken = False
            return None

    def sent(self) -> None:
        """What `next_parts` gave has gone."""
        with self._room:
            if self._queue:
                self._bytes -= len(self._queue.popleft())
                self._count += 1
                self._room.notify_all()
            else:
                self._ended = True

    def is_over(self) -> bool:
        """Whether the end has been sent."""
        return self._ended

    def give_up(self, reason: str) -> None:
        """Nobody listens any more."""
        with self._room:
            self._gone = reason
            self._queue.clear()
            self._room.notify_all()
