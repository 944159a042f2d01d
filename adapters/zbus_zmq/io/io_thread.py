"""The one thread that owns every socket of a fabric.

libzmq's sockets belong to one thread at a time. Other threads post steps and wake this one, once per burst. A handler
that fails is counted and logged; it never ends the thread.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from zbus.errors import TransportError
from zbus.observe.counters import Counters
from zbus.observe.records import TRANSPORT_ERROR
from zbus.util.run_id import inherit

from .failures import zmq_errors

T = TypeVar("T")
Step = Callable[[], None]

CALL_S = 10.0  # how long another thread waits for a step
WOKEN_BYTES = 4096
BUSY_S = 1.0  # a longer turn is reported, because it delays all sending and receiving


class IoThread:
    """A context, a poller, timers and a queue of steps, all on one thread."""

    def __init__(self, name: str, counts: Counters) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._counts = counts
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._posted: deque[Step] = deque()
        self._armed = False
        self._wake_lock = threading.Lock()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._handlers: dict[Any, Step] = {}
        self._timers: list[tuple[float, int, Step]] = []
        self._ordinal = itertools.count()
        self._last: list[Step] = []
        self._ending = False
        self._thread = threading.Thread(target=inherit(self._run), name=name, daemon=True)
        self._thread.start()

    # any thread

    def post(self, step: Step) -> None:
        """Queue `step` after the steps that were posted before. Never waits."""
        self._posted.append(step)
        if not self._armed:
            self._wake()

    def call(self, doing: str, step: Callable[[], T], timeout_s: float = CALL_S) -> T:
        """Run `step` on the thread and return its result, or raise its error."""
        if threading.current_thread() is self._thread:
            return step()
        done = threading.Event()
        outcome: list[Any] = []

        def run() -> None:
            try:
                with zmq_errors(doing):
                    outcome.extend((step(), None))
            except Exception as error:
                outcome.extend((None, error))
            done.set()

        if self._ending:
            raise TransportError(f"cannot {doing}: the fabric is closed")
        self.post(run)
        deadline = time.monotonic() + timeout_s
        while not done.wait(min(0.5, max(0.0, deadline - time.monotonic()))):
            if not self._thread.is_alive() or time.monotonic() >= deadline:
                raise TransportError(f"cannot {doing}: the fabric is closed or does not respond")
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def close(self, timeout_s: float) -> bool:
        """Run the final steps, close every socket and end the thread. Return whether it ended in time. Idempotent."""
        self._ending = True
        self._wake()
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # only this thread

    def on_readable(self, socket: Any, handler: Step) -> None:
        """Call `handler` while `socket` has something to read: it takes a bounded number of messages."""
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def read(self, socket: Any) -> None:
        """Call the handler of `socket` now, if it has one: afterwards no message of it is half taken."""
        if handler := self._handlers.get(socket):
            self._guarded(handler)

    def forget(self, socket: Any) -> None:
        """Undo `on_readable`."""
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def later(self, delay_s: float, step: Step) -> None:
        """Run `step` once, after a delay."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._ordinal), step))

    def every(self, interval_s: float, step: Step) -> None:
        """Run `step` at an interval."""

        def again() -> None:
            self.later(interval_s, again)
            step()

        self.later(interval_s, again)

    def at_end(self, step: Step) -> None:
        """Run `step` when the thread ends, before its sockets close."""
        self._last.append(step)

    def _wake(self) -> None:
        with self._wake_lock:
            if self._armed or self._wake_out < 0:
                return
            self._armed = True
            os.write(self._wake_out, b"w")

    def _run(self) -> None:
        try:
            while not self._ending:
                begun = time.thread_time()  # without the time that it waits
                self._turn()
                if (busy_s := time.thread_time() - begun) > BUSY_S:
                    self._counts.report(TRANSPORT_ERROR, "io_busy", self._thread.name, detail=f"{busy_s:.1f} s")
            self._steps()
            for step in self._last:
                self._guarded(step)
        finally:
            self._let_go()

    def _turn(self) -> None:
        for source, _ in self._poller.poll(self._until_timer_ms()):
            if source == self._wake_in:
                os.read(self._wake_in, WOKEN_BYTES)
                self._armed = False  # before draining: a step that is posted from here on wakes the thread again
            elif handler := self._handlers.get(source):
                self._guarded(handler)
        self._steps()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._guarded(heapq.heappop(self._timers)[2])

    def _steps(self) -> None:
        for _ in range(len(self._posted)):
            self._guarded(self._posted.popleft())

    def _until_timer_ms(self) -> int | None:
        if self._posted:
            return 0
        if not self._timers:
            return None
        return max(0, int((self._timers[0][0] - time.monotonic()) * 1000) + 1)

    def _guarded(self, step: Step) -> None:
        try:
            step()
        except Exception as error:
            self._counts.report(TRANSPORT_ERROR, "io_failed", getattr(step, "__qualname__", "step"), detail=repr(error))

    def _let_go(self) -> None:
        self._ending = True
        self.context.destroy()  # each socket lingers as configured
        with self._wake_lock:
            os.close(self._wake_in)
            os.close(self._wake_out)
            self._wake_out = -1
