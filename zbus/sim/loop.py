"""The event loop of a simulated world: one thread, virtual time, and processes that can be killed and frozen.

Callbacks run in the order in which they were scheduled. If none is ready, time jumps to the next timer, so an idle
minute costs nothing. Timers of the same time run in the order of their creation. Nothing here depends on the machine,
so the same program runs in the same order each time.

A context variable says to which process a callback belongs. asyncio passes contexts on to tasks, timers and callbacks,
so the code that is simulated does not know about it. A callback of a killed process is put aside and never runs: no
`finally` block, no goodbye, as after `kill -9`. A callback of a frozen process runs when the process is thawed, so its
timers fire late, as after SIGSTOP.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from .errors import WorldBoundary, WorldStuck

T = TypeVar("T")

STANDSTILL_STEPS = 2_000_000  # callbacks without time passing: more mean that a loop never ends
TASKS_KEPT = 256  # of one process, before those that have ended are removed

# What the network and the operating system offer to an ordinary event loop.
_OUTSIDE = (
    "add_reader",
    "add_signal_handler",
    "add_writer",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "getnameinfo",
    "sendfile",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_sendall",
    "start_tls",
    "subprocess_exec",
    "subprocess_shell",
)


class Process:
    """A run of a node's program. `kill` and `freeze` act on everything that it has scheduled."""

    __slots__ = ("alive", "context", "frozen", "halted", "kept", "name", "tasks")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.frozen = True, False
        self.halted = False  # killed or frozen: the loop looks only at this
        self.kept: list[Handle] = []  # while halted
        self.tasks: list[asyncio.Task[Any]] = []
        # Kept as long as the world: if the tasks of a killed process were collected, their `finally` blocks would run.
        self.context = copy_context()
        self.context.run(current_process.set, self)

    @property
    def node(self) -> str:
        """The name of its node."""
        return self.name.rpartition("#")[0]

    def kill(self) -> None:
        """Stop at once. Nothing of this process runs again."""
        self.alive, self.halted = False, True

    def freeze(self) -> None:
        """Stop until `thaw`."""
        self.frozen = self.halted = True

    def thaw(self, loop: SimLoop) -> None:
        """Continue. What was due meanwhile runs now, in order."""
        if self.alive and self.frozen:
            self.frozen = self.halted = False
            kept, self.kept = self.kept, []
            loop.resume(kept)

    def check(self) -> None:
        """Raise `RuntimeError` if this process is dead: nothing of it may have an effect."""
        if not self.alive:
            raise RuntimeError(f"process {self.name} was killed")


current_process: ContextVar[Process | None] = ContextVar("zbus_sim_process", default=None)


class Handle:
    """A scheduled callback."""

    __slots__ = ("_when", "args", "callback", "context", "process")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context, when: float) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args, self.context, self._when = args, context, when
        self.process = context.get(current_process)

    def cancel(self) -> None:
        """Do not run it."""
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self.callback is None

    def when(self) -> float:
        """Return the time for which it was scheduled."""
        return self._when


class SimulatedExecutor(Protocol):
    """An executor whose calls take virtual time."""

    def run_on_loop(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a call; the future gets its result."""


class SimLoop(asyncio.AbstractEventLoop):
    """An event loop with virtual time. `run(…)` in this package makes one."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._created = 0  # timers: equal times keep the order of their creation
        self._closed = self._running = False
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._default: Callable[[], SimulatedExecutor] | None = None
        self._tasks: list[asyncio.Task[Any]] = []  # of the scenario
        self._stuck: WorldStuck | None = None
        self.at_close: list[Callable[[], object]] = []
        self.steps = 0
        self.limit_s = math.inf  # of virtual time

    # Scheduling.

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        """Run a callback after those that are ready."""
        handle = Handle(callback, args, copy_context() if context is None else context, self._now)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        """Run a callback after `delay` seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        """Run a callback at a time."""
        handle = Handle(callback, args, copy_context() if context is None else context, when)
        self._created += 1
        heapq.heappush(self._timers, (when, self._created, handle))
        return handle

    def resume(self, handles: list[Handle]) -> None:
        """Schedule callbacks that were put aside."""
        self._ready.extend(handles)

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        """Run a coroutine in the process of the caller, or of `context`."""
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, name=name, context=context)
        process = current_process.get() if context is None else context.get(current_process)
        tasks = self._tasks if process is None else process.tasks
        tasks.append(task)
        if len(tasks) > TASKS_KEPT and len(tasks) & (len(tasks) - 1) == 0:
            tasks[:] = [each for each in tasks if not each.done()]
        return task

    def set_default_executor(self, make: Any) -> None:
        """Set the function that makes the executor of `run_in_executor(None, …)`."""
        self._default = make

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a call on a simulated thread."""
        if executor is None:
            if self._default is None:
                raise WorldBoundary("run_in_executor(None, …)", "call it in a node of a world")
            executor = self._default()
        if not hasattr(executor, "run_on_loop"):
            raise WorldBoundary(f"the executor {type(executor).__name__}", "use asyncio.to_thread")
        future: asyncio.Future[T] = executor.run_on_loop(partial(func, *args) if args else func)
        return future

    # Running.

    def run_until_complete(self, future: Any) -> Any:
        """Run until a coroutine, a task or a future is done, and return its result."""
        self._check_usable()
        main = asyncio.ensure_future(future, loop=self)
        self._tasks.append(main)
        before = asyncio._get_running_loop()
        if before is not None:
            raise RuntimeError("zbus.sim.run() cannot be called from a running event loop")
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=lambda _: None, finalizer=self._finalize)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            self._run(main)
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        if self._stuck is not None and main.cancelled():
            raise self._stuck
        return main.result()

    def _interrupt(self, main: asyncio.Future[Any], reason: str) -> None:
        """End the scenario, because it would never end: cancel it once, so that it can clean up."""
        if self._stuck is not None:
            raise self._stuck
        self._stuck = WorldStuck(reason, self)
        self.limit_s = math.inf
        main.cancel()

    def _run(self, main: asyncio.Future[Any]) -> None:
        ready, timers, pop = self._ready, self._timers, heapq.heappop
        standing = 0
        done = main.done
        while not done():
            if ready:
                handle = ready.popleft()
                standing += 1
                if standing > STANDSTILL_STEPS:
                    raise WorldStuck(f"time stands still at {self._now:.6f} s: callbacks schedule each other", self)
            elif timers:
                when, _, handle = pop(timers)
                if when > self._now:
                    if handle.callback is None:
                        continue
                    self._now = when
                    standing = 0
                    if when > self.limit_s:
                        self._interrupt(main, f"the scenario did not end within {self.limit_s:g} virtual seconds")
            else:
                self._interrupt(main, "nothing is scheduled, and the scenario still waits")
                continue
            callback = handle.callback
            if callback is None:
                continue
            process = handle.process
            if process is not None and process.halted:
                process.kept.append(handle)
                continue
            self.steps += 1
            try:
                handle.context.run(callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except WorldStuck:
                raise
            except BaseException as error:
                name = getattr(callback, "__qualname__", repr(callback))
                self.call_exception_handler({"message": f"exception in {name}", "exception": error})

    def run_forever(self) -> NoReturn:
        """Not supported: a world ends with its scenario."""
        raise WorldBoundary("run_forever", "use zbus.sim.run(scenario())")

    def drain(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Let cancelled tasks end, in no virtual time, as far as they do."""
        asyncio._set_running_loop(self)
        try:
            for task in tasks:
                task.cancel()
            for _ in range(STANDSTILL_STEPS):
                if not self._ready:
                    break
                handle = self._ready.popleft()
                if handle.callback is not None:
                    try:
                        handle.context.run(handle.callback, *handle.args)
                    except BaseException:  # noqa: S110 - the world has ended; what its remains raise says nothing
                        pass
        finally:
            asyncio._set_running_loop(None)

    def open_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of the scenario that have not ended."""
        return [task for task in dict.fromkeys(self._tasks) if not task.done()]

    def is_running(self) -> bool:
        """Return whether the loop runs."""
        return self._running

    def is_closed(self) -> bool:
        """Return whether the loop is closed."""
        return self._closed

    def stop(self) -> NoReturn:
        """Not supported: a world ends with its scenario."""
        raise WorldBoundary("loop.stop()", "return from the scenario")

    def close(self) -> None:
        """Forget everything that is scheduled. If the scenario was interrupted, let it clean up first."""
        if not self._closed and (left := self.open_tasks()):
            self._handler = lambda loop, context: None
            self.drain(left)
            for task in left:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        # Events lead to the loop, and they are invisible to the collector.
        self._closed, self._handler, self._default = True, None, None
        for each in self.at_close:
            each()
        self.at_close.clear()
        self._ready.clear()
        self._timers.clear()
        self._tasks.clear()

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this event loop is closed")

    # What asyncio asks of a loop.

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Has no effect."""

    def get_task_factory(self) -> None:
        """Return None."""
        return

    def set_exception_handler(self, handler: Any) -> None:
        """Call `handler(loop, context)` for exceptions of callbacks."""
        self._handler = handler

    def get_exception_handler(self) -> Any:
        """Return the handler."""
        return self._handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise the exception in the scenario: nothing may fail silently."""
        error = context.get("exception")
        raise error if isinstance(error, BaseException) else RuntimeError(context.get("message"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Pass on an exception that no caller gets."""
        if self._closed:
            return  # a finalizer of what an interrupted run left behind
        if self._handler is None:
            self.default_exception_handler(context)
        else:
            self._handler(self, context)

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: the world ends all of its tasks."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: simulated threads need no end."""

    def _finalize(self, generator: Any) -> None:
        """Close an asynchronous generator that was dropped, in the process that dropped it."""
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())


def _outside(name: str) -> Callable[..., NoReturn]:
    def refuse(self: SimLoop, *args: Any, **options: Any) -> NoReturn:
        raise WorldBoundary(f"loop.{name}()", "nothing outside exists in a simulated world")

    return refuse


for _name in _OUTSIDE:
    setattr(SimLoop, _name, _outside(_name))
