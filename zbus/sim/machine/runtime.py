"""The runtime of a simulated process: its clock, its chance, and threads that are only latencies.

Work on a thread becomes one step of the loop, after a delay from the process's own random source. Threads of one node
therefore never run at the same time: races between real threads inside a node are not simulated.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor, Future
from heapq import heapify, heapreplace
from random import Random
from typing import Any, TypeVar

from zbus.util.backoff import Backoff
from zbus.util.driver import RETRY_S, Driver, OnError, Step
from zbus.util.run_id import run_id
from zbus.util.runtime import Runtime, Thread

from .loop import Process, SimLoop

T = TypeVar("T")

EPOCH_NS = 1_800_000_000_000_000_000  # the wall clock at virtual time 0
CALL_S = (0.00005, 0.001)  # how long a call on a thread takes
WAKE_S = 0.0005  # how long a thread takes at most to notice that it was woken


class Clock:
    """The wall clock of a machine. `skew_ns` is how far it is ahead of the world's."""

    __slots__ = ("_loop", "skew_ns")

    def __init__(self, loop: SimLoop, skew_s: float = 0.0) -> None:
        self._loop, self.skew_ns = loop, int(skew_s * 1e9)

    @property
    def zero_ns(self) -> int:
        """The time that this clock shows at virtual time 0."""
        return EPOCH_NS + self.skew_ns

    def time_ns(self) -> int:
        """Return Unix time in nanoseconds, as this machine sees it."""
        return EPOCH_NS + int(self._loop.time() * 1e9) + self.skew_ns


class Worker:
    """A simulated thread. `block` lets the call that it runs take longer."""

    __slots__ = ("busy_until",)

    def __init__(self) -> None:
        self.busy_until = 0.0

    def block(self, until: float) -> None:
        """The call that runs now returns at `until` for the thread, although it has taken effect already."""
        self.busy_until = max(self.busy_until, until)


class SimRuntime(Runtime):
    """Clocks, randomness and threads of one process."""

    def __init__(self, loop: SimLoop, process: Process, clock: Clock, chance: Random, pid: int, host: str) -> None:
        super().__init__()
        self.loop, self.process, self.chance = loop, process, chance
        self.worker: Worker | None = None  # the thread that runs now
        self.shared: SimRuntime = self  # `for_node` makes copies; the running thread is noted here
        self.monotonic = loop.time
        self.monotonic_ns = lambda: int(loop.time() * 1e9)
        self.time_ns = clock.time_ns
        self.randbits = chance.getrandbits
        self.token_hex = lambda count: chance.randbytes(count).hex()
        self.uniform = chance.uniform
        self.pid = lambda: pid
        self.hostname = lambda: host
        self.boot_id = lambda: host  # its monotonic clock never starts anew
        self.clock_zero_ns = self.time_ns() - self.monotonic_ns()

    def executor(self, threads: int, name: str) -> Executor:
        """Return a simulated executor."""
        return SimExecutor(self, threads)

    def thread(self, target: Callable[[], Any], name: str) -> Thread:
        """Run `target` in one step, a moment from now."""
        return SimThread(self, target)

    def driver(self, step: Step, name: str, on_error: OnError) -> Driver:
        """Call `step` until it returns None."""
        return SimDriver(self, step, on_error)

    def context(self) -> Any:
        """Return the context of a new thread of this process."""
        context = self.process.context.copy()
        context.run(run_id.set, self.run_id or run_id.get())
        return context

    def run_as(self, worker: Worker, call: Callable[[], T]) -> T:
        """Run a call as if on a thread."""
        shared = self.shared
        before, shared.worker = shared.worker, worker
        try:
            return call()
        finally:
            shared.worker = before

    def block(self, until: float) -> None:
        """Let the thread that runs now be busy until a time. Has no effect outside of threads."""
        if self.shared.worker is not None:
            self.shared.worker.block(until)


class SimExecutor(Executor):
    """Starts calls in order, each on the worker that is free first. A call takes a moment and runs as one step."""

    def __init__(self, runtime: SimRuntime, threads: int) -> None:
        self._runtime, self._loop = runtime, runtime.loop
        self._free = [(0.0, number) for number in range(threads)]  # a heap: when each worker is free
        heapify(self._free)
        self._workers = [Worker() for _ in range(threads)]
        self._context = runtime.context()
        self._waiting: dict[int, tuple[float, Callable[[], None], Callable[[], object]]] = {}
        self._number = 0
        self._ended = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        """Run a call."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **options))
                except BaseException as error:
                    future.set_exception(error)

        self._schedule(run, future.cancel)
        return future

    def run_on_loop(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a call; the future gets its result on the loop."""
        future: _Awaited[T] = _Awaited(loop=self._loop)

        def run() -> None:
            if future.is_withdrawn:
                return
            try:
                result = call()
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        future.begins = self._schedule(run, future.cancel)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Run what has begun, and the rest too unless it is cancelled."""
        self._ended = True
        waiting, self._waiting = self._waiting, {}
        now = self._loop.time()
        for begins, run, cancel in waiting.values():
            cancel() if cancel_futures and begins > now else run()

    def _schedule(self, run: Callable[[], None], cancel: Callable[[], object]) -> float:
        """Plan a call. Returns when a worker begins with it."""
        if self._ended:
            raise RuntimeError("cannot schedule new futures after shutdown")
        now, chance = self._loop.time(), self._runtime.chance
        free_at, at = self._free[0]
        begins = max(now, free_at, self._workers[at].busy_until)
        ends = begins + CALL_S[0] + chance.random() * (CALL_S[1] - CALL_S[0])
        heapreplace(self._free, (ends, at))
        self._number += 1
        number = self._number
        self._waiting[number] = begins, run, cancel
        self._loop.call_at(ends, self._step, number, at, context=self._context)
        return begins

    def _step(self, number: int, at: int) -> None:
        entry = self._waiting.pop(number, None)
        if entry is None:
            return
        worker = self._workers[at]
        if worker.busy_until > self._loop.time():  # the call before this one took longer
            self._waiting[number] = entry
            self._loop.call_at(worker.busy_until, self._step, number, at, context=self._context)
            return
        self._runtime.run_as(worker, entry[1])


class _Awaited(asyncio.Future[T]):
    """The result of a call on a thread. Cancelling it withdraws the call only if no thread has begun with it."""

    begins = 0.0
    is_withdrawn = False

    def cancel(self, msg: Any = None) -> bool:
        """Do not wait for the result."""
        if not super().cancel(msg):
            return False
        self.is_withdrawn = self.get_loop().time() < self.begins
        return True


class SimThread:
    """A call that runs once, a moment after its start."""

    def __init__(self, runtime: SimRuntime, target: Callable[[], Any]) -> None:
        self._runtime, self._target, self._done = runtime, target, False
        delay = runtime.chance.random() * CALL_S[1]
        runtime.loop.call_later(delay, self._run, context=runtime.context())

    def _run(self) -> None:
        try:
            self._runtime.run_as(Worker(), self._target)
        finally:
            self._done = True

    def join(self, timeout: float | None = None) -> None:
        """Return at once: a step cannot wait for another one."""

    def is_alive(self) -> bool:
        """Return whether it has not run yet."""
        return not self._done


class SimDriver(Worker):
    """Calls a step when it is due or woken, a moment later, as a thread would."""

    __slots__ = (
        "_chance",
        "_context",
        "_due",
        "_ended",
        "_loop",
        "_on_error",
        "_pauses",
        "_runtime",
        "_step",
        "_timer",
    )

    def __init__(self, runtime: SimRuntime, step: Step, on_error: OnError) -> None:
        super().__init__()
        self._runtime, self._step, self._on_error = runtime, step, on_error
        self._loop, self._chance = runtime.loop, runtime.chance
        self._context = runtime.context()
        self._pauses = Backoff(*RETRY_S, uniform=runtime.uniform)
        self._ended = False
        self._due = math.inf  # the time of `_timer`
        self._timer: Any = None
        self._plan(self._loop.time() + self._chance.random() * WAKE_S)

    def wake(self) -> None:
        """Call the step soon."""
        if self._ended:
            return
        latest = self._loop.time() + WAKE_S
        if self._due > latest:
            self._plan(max(self._loop.time() + self._chance.random() * WAKE_S, self.busy_until))

    def join(self, timeout_s: float) -> bool:
        """Run the steps that are due now. Return whether the last one has returned None."""
        while not self._ended and self.busy_until <= self._loop.time():
            before = self._loop.time()
            due = self._call()
            if due is not None and due > before:
                break
        return self._ended

    def _plan(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = when
        self._timer = self._loop.call_at(when, self._run, context=self._context)

    def _run(self) -> None:
        self._timer, self._due = None, math.inf
        now = self._loop.time()
        while not self._ended:
            if self.busy_until > now:
                self._plan(self.busy_until)
                return
            due = self._call()
            if due is None:
                return
            if due > now:
                if due < self._due:
                    self._plan(max(due, self.busy_until))
                return

    def _call(self) -> float | None:
        """Call the step once. Returns when it is due again, or None at the end."""
        try:
            due = self._runtime.run_as(self, self._step)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            pause_s = self._pauses.next()
            self._on_error(error, pause_s)
            self.block(self._loop.time() + pause_s)
            return self.busy_until
        self._pauses.reset()
        if due is None:
            self._ended = True
        return due
