"""A node of a simulated world: its machine (disk and clock), and the process that runs on it now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from zbus.bridge.bridge import Bridge
from zbus.bridge.config import BridgeConfig
from zbus.config import BusConfig
from zbus.errors import ZbusError
from zbus.ports.fabric import Fabric
from zbus.ports.log import Log

from .bus import SimBus
from .errors import ProcessKilled, told
from .ledger import CLOSES, GAPS, NO_EXCEPTION, Ledger
from .machine.disk import Disk
from .machine.fabric import SimFabric, SimNet
from .machine.log import Retention, SimLog
from .machine.loop import Process, SimLoop, current_process
from .machine.runtime import Clock, SimRuntime

if TYPE_CHECKING:
    from zbus.observe.tracing import Tracing

T = TypeVar("T")

# A program: what a process does once its bus is open. It is cancelled when the node stops.
Program = Callable[[SimBus], Awaitable[object]]
CLOSE_SLACK_S = 1.5  # beyond `close_timeout_s`, for the steps between
WATCHED_GAPS = 100_000
TO_THREAD = 8  # threads of `asyncio.to_thread`


class Machines(Protocol):
    """The world, as a node needs it."""

    loop: SimLoop
    ledger: Ledger

    def disk(self, name: str) -> Disk:
        """Return the disk of a log."""

    def net(self, url: str) -> SimNet:
        """Return a transport."""

    def source(self, name: str) -> Random:
        """Return a random source of its own."""

    def note(self, kind: str, node: str, *values: object) -> None:
        """Add a step to the trace."""

    def next_pid(self) -> int:
        """Return a process id."""


class SimNode:
    """A machine. `bus` is the bus of the process that runs on it; after `kill` or `stop`, `start` runs a new one.

    `await node.call(lambda: …)` runs a coroutine in its process, and raises `ProcessKilled` if that is killed.
    """

    def __init__(
        self, world: Machines, name: str, config: BusConfig | BridgeConfig, program: Program | None, skew_s: float
    ) -> None:
        self.name, self._world, self.config = name, world, config
        self.programs = [] if program is None else [program]
        self.clock = Clock(world.loop, skew_s)
        self.process: Process | None = None
        self.processes: list[Process] = []  # all of them, until the world ends
        self.is_down = True  # killed or stopped
        self._bus: SimBus | None = None
        self._bridge: Bridge | None = None
        self._calls: dict[asyncio.Future[Any], None] = {}
        self._programs: list[asyncio.Task[Any]] = []
        self.fabrics: list[SimFabric] = []
        self.logs: list[SimLog] = []  # of all processes
        self.opened: list[SimBus | Bridge] = []  # of all processes
        self.disk = world.disk(config.log) if config.log is not None else None
        if self.disk is not None:
            world.ledger.disks[name] = self.disk
            self.disk.on_stored = self._stored
            self.disk.on_removed = world.ledger.excuse

    @property
    def bus(self) -> SimBus:
        """The bus of the current process."""
        if self._bus is None:
            raise ProcessKilled(self.name)
        return self._bus

    @property
    def bridge(self) -> Bridge:
        """The bridge of the current process."""
        if self._bridge is None:
            raise ProcessKilled(self.name)
        return self._bridge

    @property
    def is_alive(self) -> bool:
        """Whether its process runs, frozen or not."""
        return self.process is not None and self.process.alive and not self.is_down

    # Processes.

    async def start(self) -> SimNode:
        """Start a process: open the bus, and run the program. Raises what opening the bus raises."""
        world = self._world
        if self.is_alive:
            raise ZbusError(f"node {self.name} runs already: stop or kill it first")
        self.is_down = False
        self.process = process = Process(f"{self.name}#{len(self.processes) + 1}")
        self.processes.append(process)
        chance = world.source(f"process/{process.name}")
        runtime = SimRuntime(world.loop, process, self.clock, chance, world.next_pid(), self.name)
        ports = SimPorts(world, self, runtime)
        self.executor = runtime.executor(TO_THREAD, "to-thread")
        self.fabrics = []
        self._programs = []
        world.note("started", self.name, process.name)
        try:
            if isinstance(self.config, BridgeConfig):
                self._bridge = bridge = process.context.copy().run(Bridge.of, self.config, runtime, ports)
                self.opened.append(bridge)
                await self.call(bridge.start)
            else:
                config = self.config
                make = lambda: SimBus(config, runtime, ports, world.ledger, self)  # noqa: E731
                self._bus = bus = process.context.copy().run(make)
                self.opened.append(bus)
                await self.call(bus.start)
                self.spawn(self._watch_gaps)
                for program in self.programs:
                    self.spawn(partial(program, bus))
        except BaseException:
            if self.process is process:
                self.is_down = True
            raise
        return self

    async def stop(self) -> None:
        """Stop in an orderly way: cancel the program and close the bus."""
        process = self.process
        if process is None or not self.is_alive:
            return
        world, began = self._world, self._world.loop.time()
        opened = self._bridge if self._bridge is not None else self._bus
        world.note("stopping", self.name, process.name)

        async def close() -> None:
            for task in self._programs:
                task.cancel()
            if opened is not None:
                await opened.aclose()

        with suppress(ProcessKilled):
            await self.call(close)
        limit = 5.0 if isinstance(self.config, BridgeConfig) else self.config.close_timeout_s
        took = world.loop.time() - began
        if process.alive and not process.frozen and took > limit + CLOSE_SLACK_S:
            world.ledger.broken(CLOSES, self.name, f"closing took {took:.2f} s, and the limit is {limit:g} s")
        if self.process is process:
            self._end(process, power_cut=False)
        world.note("stopped", self.name, process.name)

    def kill(self, *, power_cut: bool = False) -> None:
        """kill -9. With `power_cut`, the power fails: unsynced data is lost as well."""
        process = self.process
        if process is not None and process.alive and not self.is_down:
            self._world.note("killed", self.name, process.name, "power cut" if power_cut else "")
            self._world.ledger.killed(self.name)
            self._end(process, power_cut)

    def _end(self, process: Process, power_cut: bool) -> None:
        process.kill()
        self.is_down = True
        self._bus = self._bridge = None
        for fabric in self.fabrics:
            fabric.gone()
        if self.disk is not None:
            self.disk.process_ended(power_cut=power_cut)
        calls, self._calls = self._calls, {}
        for future in calls:
            if not future.done():
                future.set_exception(ProcessKilled(process.name))

    def freeze(self) -> None:
        """Suspend the process until `thaw`, as with SIGSTOP."""
        if self.process is not None and self.is_alive:
            self._world.note("frozen", self.name)
            self.process.freeze()

    def thaw(self) -> None:
        """Let the process continue."""
        if self.process is not None and self.process.frozen:
            self._world.note("thawed", self.name)
            self.process.thaw(self._world.loop)

    def forget(self) -> None:
        """Drop what killed processes left behind: the world has ended.

        Bursts of events, as events themselves, are invisible to the garbage collector, and lead to everything.
        """
        for process in self.processes:
            process.tasks.clear()
            process.kept.clear()
        for log in self.logs:
            log.forget()
        for opened in self.opened:
            if (commits := opened._node.commits) is not None:
                commits._in_flight.clear()

    # Code in its process.

    def also(self, program: Program) -> None:
        """Run another program on this node, from now on and after each restart."""
        self.programs.append(program)
        if self.is_alive:
            self.spawn(partial(program, self.bus))

    async def call(self, make: Callable[[], Awaitable[T]], process: Process | None = None) -> T:
        """Run a coroutine in a process of this node, by default the current one, and return its result."""
        process = process or self.process
        if process is None or not process.alive:
            raise ProcessKilled(process.name if process is not None else self.name)
        if current_process.get() is process:
            return await make()
        loop = self._world.loop
        future: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # counts as retrieved
        task = loop.create_task(_awaited(make), context=process.context.copy())
        self._calls[future] = None

        def ended(task: asyncio.Task[T]) -> None:
            self._calls.pop(future, None)
            if future.done():
                return
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        task.add_done_callback(ended)
        try:
            return await future
        except asyncio.CancelledError:
            task.cancel()
            raise

    def spawn(self, make: Callable[[], Awaitable[object]]) -> None:
        """Run a coroutine in the process of this node, in the background. If it raises, the world fails."""
        process = self.process
        if process is None or not process.alive:
            raise ProcessKilled(self.name)
        task = self._world.loop.create_task(_awaited(make), context=process.context.copy())
        self._programs.append(task)
        task.add_done_callback(self._program_ended)

    def _program_ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self.is_alive and not _is_closing(self._bus):
            self._world.ledger.broken(NO_EXCEPTION, self.name, f"its program raised {told(error)}")

    async def _watch_gaps(self) -> None:
        async with self.bus.subscribe(GAPS, queue_events=WATCHED_GAPS) as gaps:
            async for _ in gaps:
                pass

    def _stored(self, rows: Any, offsets: Any) -> None:
        assert self.disk is not None
        self._world.note("stored", self.name, len(rows), offsets[0], offsets[-1])
        self._world.ledger.stored(self.name, self.disk, rows, offsets, self.clock.zero_ns)


class SimPorts:
    """Opens simulated logs and transports for the process of one node."""

    def __init__(self, world: Machines, node: SimNode, runtime: SimRuntime) -> None:
        self._world, self._node, self._runtime = world, node, runtime

    def open_log(self, config: BusConfig) -> Log | None:
        """Open the log on the node's disk."""
        disk, loop, runtime = self._node.disk, self._world.loop, self._runtime
        if disk is None:
            return None
        context = runtime.context()

        def later(delay: float, call: Callable[[], object]) -> object:
            return loop.call_later(delay, call, context=context)

        kept = (config.retain_age_s, config.retain_events, config.retain_bytes)
        by_key = tuple(config.retain_keys_s.items())
        is_limited = by_key or any(each is not None for each in kept)
        rules = Retention(*kept, config.retain_ignore_cursors, by_key) if is_limited else None
        owner, pid = f"process {runtime.pid()}", runtime.pid()
        log = SimLog(
            disk,
            later,
            runtime.time_ns,
            runtime.chance,
            owner=owner,
            pid=pid,
            read_only=config.read_only,
            retention=rules,
        )
        self._node.logs.append(log)
        return log

    def open_fabric(self, config: BusConfig, url: str, session: Any) -> Fabric:
        """Open the node's end of a transport."""
        runtime = self._runtime
        name, _, options = url.partition("?")
        fabric = SimFabric(
            self._world.net(name),
            self._node.name,
            runtime.context(),
            runtime.block,
            events_only="events_only" in options,
            dense="sparse" not in options,
        )
        self._node.fabrics.append(fabric)
        return fabric

    def open_tracing(self, config: BusConfig) -> Tracing | None:
        """Return None: a simulated node makes no spans."""
        return None


async def _awaited(make: Callable[[], Awaitable[T]]) -> T:
    return await make()


def _is_closing(bus: SimBus | None) -> bool:
    return bus is None or bus._node.is_closing
