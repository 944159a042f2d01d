"""The one thread that touches ZMQ sockets, and the queue by which other threads hand it events.

Sockets belong to one thread, so everything else posts to this one. What waits here is bounded: whoever
hands over more than the network takes waits in turn, and is told after a while.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from zbus.errors import FabricError
from zbus.observe.records import EVENT_DROPPED, FABRIC_ERROR, record

from .sockets import LINGER_MS
from .translate import Outgoing

QUEUE_EVENTS_MAX = 20_000
QUEUE_BYTES_MAX = 64 * 1024 * 1024
SEND_WAIT_S = 5.0
FLUSH_S = 2.0
IDLE_S = 1.0


class Side(Protocol):
    """What a mode of working does on the loop's thread."""

    def take(self, events: Sequence[Outgoing]) -> None:
        """Queue events."""

    def flush(self, now: float) -> tuple[int, int, float]:
        """Send what can be sent: how many events and bytes left the queue, and when to call again."""

    def close(self) -> None:
        """Close every socket."""

    def closed(self) -> None:
        """Everything that was sent is gone, and so are the sockets."""


class ZmqLoop:
    """A context, a poller and a thread. `post` runs a function there; `hand_over` queues events."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.context.max_sockets = 16_384
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._poller.register(self._near, zmq.POLLIN)
        self._room = threading.Condition()
        self._events = self._bytes = 0
        self._ending_at: float | None = None
        self._side: Side | None = None
        self._thread = threading.Thread(target=self._run, name="zbus-dynamo-zmq", daemon=True)

    def start(self, side: Side) -> None:
        """Begin. Nothing is taken before."""
        self._side = side
        self._thread.start()

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the loop's thread, soon and in order."""
        self._posted.append(function)
        try:
            self._far.send(b"\0")
        except OSError:
            pass  # a wake is under way already, or the thread has ended

    def wait_for(self, function: Callable[[], None], timeout_s: float = SEND_WAIT_S) -> None:
        """Run a function there and wait until it returned."""
        if self._ending_at is not None:
            raise FabricError("the fabric is closed")
        done = threading.Event()

        def run() -> None:
            try:
                function()
            finally:
                done.set()

        self.post(run)
        if not done.wait(timeout_s):
            raise FabricError("the thread of the dynamo wire does not answer")

    def hand_over(self, events: Sequence[Outgoing]) -> None:
        """Queue events; waits for room, and raises `FabricError` where there is none for long."""
        assert self._side is not None
        side, size = self._side, sum(len(event.body) for event in events)
        with self._room:
            full = not self._room.wait_for(self._has_room, SEND_WAIT_S)
            if self._ending_at is not None:
                raise FabricError("the fabric is closed; nothing was sent")
            if full:
                raise FabricError(f"nothing leaves for {SEND_WAIT_S:g} s: discovery or the network is stuck")
            self._events += len(events)
            self._bytes += size
        self.post(lambda: side.take(events))

    @property
    def queued(self) -> int:
        """How many events wait to be sent."""
        return self._events

    @property
    def ending(self) -> bool:
        """Whether it is closing, and what is left should go soon."""
        return self._ending_at is not None

    def watch(self, socket_: Any, handler: Callable[[], None]) -> None:
        """Call `handler` whenever there is something to receive. On the loop's thread."""
        self._handlers[socket_] = handler
        self._poller.register(socket_, zmq.POLLIN)

    def unwatch(self, socket_: Any) -> None:
        """Undo `watch`."""
        if self._handlers.pop(socket_, None) is not None:
            self._poller.unregister(socket_)

    def close(self) -> None:
        """Send what is queued for as long as there is time, then close everything. Safe to call twice."""
        with self._room:
            if self._ending_at is None:
                self._ending_at = time.monotonic() + FLUSH_S
            self._room.notify_all()
        if self._thread.ident is None:
            self._release()
            return
        self.post(lambda: None)
        self._thread.join(FLUSH_S + LINGER_MS / 1000 + 5.0)

    def _has_room(self) -> bool:
        return self._ending_at is not None or (self._events < QUEUE_EVENTS_MAX and self._bytes < QUEUE_BYTES_MAX)

    def _run(self) -> None:
        assert self._side is not None
        again_at = 0.0
        while not self._finished():
            wait_s = min(IDLE_S, max(0.0, again_at - time.monotonic()))
            try:
                ready = self._poller.poll(int(wait_s * 1000) + (wait_s > 0))
                self._run_posted()
                for found, _ in ready:
                    handler = self._handlers.get(found)
                    if handler is not None:
                        handler()
                again_at = self._flush(self._side)
            except Exception as error:  # the thread must outlive whatever a message or a socket does
                record(FABRIC_ERROR, logging.ERROR, error, fabric="dynamo", doing="work on the ZMQ sockets")
                again_at = time.monotonic() + 0.05
        if self._events:
            reason = f"closed before they could be sent within {FLUSH_S:g} s"
            record(EVENT_DROPPED, logging.WARNING, fabric="dynamo", reason=reason, events=self._events)
        self._side.close()
        self._release()
        self._side.closed()

    def _finished(self) -> bool:
        ending_at = self._ending_at
        return ending_at is not None and not self._posted and (self._events == 0 or time.monotonic() >= ending_at)

    def _run_posted(self) -> None:
        try:
            while self._near.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._posted:
            self._posted.popleft()()

    def _flush(self, side: Side) -> float:
        events, size, again_at = side.flush(time.monotonic())
        if events:
            with self._room:
                self._events -= events
                self._bytes -= size
                self._room.notify_all()
        return again_at

    def _release(self) -> None:
        self.context.term()  # what lingers is sent, or given up after LINGER_MS
        self._near.close()
        self._far.close()
