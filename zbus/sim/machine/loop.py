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
import logging
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from zbus.sim.errors import WorldBoundary, WorldStuck

T = TypeVar("T")

BEAT_STEPS = 0xFFF  # the loop calls the watchdog after this number of steps: a power of two, less one
STANDSTILL_STEPS = 2_000_000  # callbacks without time passing: more mean that a loop never ends
CLEANUP_S = 60.0  # how long a scenario that was interrupted may clean up
TASKS_KEPT = 256  # of one process, before those that have ended are removed

# Methods that need the network or the operating system.
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
        """Continue. Callbacks that became due in the meantime run now, in order."""
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
        self._generators: list[weakref.ref[Any]] = []  # of the scenario
        self._stuck: WorldStuck | None = None
        self.at_close: list[Callable[[], object]] = []
        self.steps = 0
        self.limit_s = math.inf  # of virtual time
        self._beat: Callable[[], object] = lambda: None

    def beat(self, call: Callable[[], object]) -> None:
        """Call a function every few thousand steps."""
        self._beat = call

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
            tasks[:] = [each for each in tasks if not each.done() or has_failed(each)]
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
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("zbus.sim.run() cannot be called from a running event loop")
        main = asyncio.ensure_future(future, loop=self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._begun, finalizer=self._finalize)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            self._run(main)
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        if self._stuck is None:
            return main.result()
        stuck, self._stuck = self._stuck, None
        try:
            main.result()
        except BaseException as error:
            for note in getattr(error, "__notes__", ()):
                stuck.add_note(note)
            raise stuck from error
        raise stuck

    def finish(self) -> None:
        """Cancel the tasks that the scenario has left, and close its asynchronous generators, as `asyncio.run` does.

        Raises the exception of a task that was never awaited: otherwise nothing would notice it.
        """
        self.limit_s = self._now + CLEANUP_S
        left = self.open_tasks()
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        generators = [generator for each in self._generators if (generator := each()) is not None]
        if generators:
            closing = [asyncio.ensure_future(_closed(each), loop=self) for each in generators]
            self.run_until_complete(asyncio.gather(*closing))
        for task in self._tasks:
            if has_failed(task) and (error := task.exception()) is not None:
                error.add_note(f"raised in {task.get_name()}, a task of the scenario that was not awaited")
                raise error

    def abandon(self) -> None:
        """Do the same after a failure, as far as possible. Exceptions of the cleanup are ignored."""
        with suppress(Exception, asyncio.CancelledError):
            self.finish()

    def _interrupt(self, main: asyncio.Future[Any], reason: str) -> None:
        """End the scenario, because it would never end: cancel it once, so that it can clean up."""
        if self._stuck is not None:
            raise self._stuck
        self._stuck = WorldStuck(reason, self)
        self.limit_s = self._now + CLEANUP_S
        main.cancel()

    def _run(self, main: asyncio.Future[Any]) -> None:
        ready, timers, pop = self._ready, self._timers, heapq.heappop
        standing = 0
        done = main.done
        while not done():
            standing += 1
            if standing > STANDSTILL_STEPS:
                raise WorldStuck(f"time stands still at {self._now:.6f} s: callbacks schedule each other", self)
            if ready:
                handle = ready.popleft()
            elif timers:
                when, _, handle = pop(timers)
                if handle.callback is None:
                    continue
                if when > self._now:
                    self._now = now = when
                    standing = 0
                    while timers and timers[0][0] <= now:  # before what these callbacks schedule, as in asyncio
                        ready.append(pop(timers)[2])
                    if now > self.limit_s:
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
            if not self.steps & BEAT_STEPS:
                self._beat()
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

    def open_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of the scenario that have not ended."""
        return [task for task in self._tasks if not task.done()]

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
        """Forget everything that is scheduled."""
        for task in self.open_tasks():
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

    # Other methods that asyncio calls.

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
        if not self._running:  # a destructor: an exception would only be printed
            logging.getLogger("asyncio").error(context.get("message"), exc_info=error)
            return
        raise error if isinstance(error, BaseException) else RuntimeError(context.get("message"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Pass on an exception that no caller gets."""
        if self._closed:
            return  # what an interrupted run leaves behind says nothing
        if self._handler is None:
            self.default_exception_handler(context)
        else:
            self._handler(self, context)

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: `finish` closes them."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: simulated threads need no end."""

    def _begun(self, generator: Any) -> None:
        """Note an asynchronous generator of the scenario. Those of a process end with it."""
        if current_process.get() is None:
            found = self._generators
            found.append(weakref.ref(generator))
            if len(found) > TASKS_KEPT and len(found) & (len(found) - 1) == 0:
                found[:] = [each for each in found if each() is not None]

    def _finalize(self, generator: Any) -> None:
        """Close an asynchronous generator that was dropped, in the process that dropped it."""
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())


def has_failed(task: asyncio.Task[Any]) -> bool:
    """Return whether a task has raised an exception that nothing has retrieved."""
    return task.done() and bool(task._log_traceback)


async def _closed(generator: Any) -> None:
    await generator.aclose()


def _outside(name: str) -> Callable[..., NoReturn]:
    def refuse(self: SimLoop, *args: Any, **options: Any) -> NoReturn:
        raise WorldBoundary(f"loop.{name}()", "nothing outside exists in a simulated world")

    return refuse


for _name in _OUTSIDE:
    setattr(SimLoop, _name, _outside(_name))
