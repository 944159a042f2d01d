"""A simulated world: nodes, networks, faults and the ledger, on one event loop with virtual time.

    async def scenario():
        async with zbus.sim.world(seed=7) as world:
            a = await world.node("a", log=True)
            b = await world.node("b", log=True)
            world.partition(a, b)
            await world.run(seconds=60)

    zbus.sim.run(scenario())

At the end of the `async with` block the world heals, waits until everything has converged, and raises `InvariantBroken`
if a promise was broken at any time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from inspect import CORO_CREATED, getcoroutinestate, iscoroutine, iscoroutinefunction
from random import Random
from types import TracebackType
from typing import Any, Literal

from zbus.bridge.config import BridgeConfig
from zbus.config import BusConfig
from zbus.errors import ConfigInvalid, ZbusError
from zbus.observe import records

from .errors import InvariantBroken, WorldBoundary, WorldStuck
from .fault_actions import FaultActions
from .faults import Fault, Faults, Plan
from .invariants import Invariants
from .ledger import INVARIANTS, LOGS_EQUAL, NO_EXCEPTION, Ledger
from .machine.boundary import boundary
from .machine.disk import Disk
from .machine.fabric import Conditions, SimNet
from .machine.loop import SimLoop, current_process
from .machine.real_log import RealLogs
from .machine.runtime import EPOCH_NS
from .node import Program, SimNode
from .route_rules import Sample, Topology
from .trace import Trace

TRANSPORT = "sim://world"
CONVERGE_S = 60.0
LIMIT_S = 3600.0
CHECK_S = 1.0
ROUNDS = 200  # of the loop, in which what is left at the end may end
FIRST_PID = 1000
RANGES_MISSED = ("gap_corrupt", "gap_trimmed")  # the codes of records about events that a log no longer has

Logs = Literal["simulated", "sqlite"]
Check = Callable[["World"], str | None]


class Overrides:
    """How a run differs from its seed: which faults of the plan it keeps, and the choices that were made smaller.

    >>> Overrides.parse(str(Overrides(faults=[0, 2], choices={"nodes": 2}))).faults
    (0, 2)
    """

    def __init__(
        self,
        faults: Iterable[int] | None = None,
        choices: Mapping[str, int] | None = None,
        calm: bool = False,
        shorter: Mapping[int, float] | None = None,
    ) -> None:
        self.faults = None if faults is None else tuple(faults)
        self.choices = dict(choices or {})
        self.calm = calm  # no drops, duplicates and long delays
        self.shorter = dict(shorter or {})  # by number of the fault: how long it lasts

    def changed(self, **changed: Any) -> Overrides:
        """Return a copy with other values."""
        return Overrides(**self.__dict__ | changed)

    def apply(self, plan: Plan) -> Plan:
        """Return the plan with the changes."""
        kept = range(len(plan.faults)) if self.faults is None else self.faults
        faults = [
            plan.faults[number]._replace(for_s=self.shorter.get(number, plan.faults[number].for_s))
            for number in kept
            if number < len(plan.faults)
        ]
        return Plan(Conditions() if self.calm else plan.conditions, tuple(faults))

    def __str__(self) -> str:
        found = {name: value for name, value in self.__dict__.items() if value or (name == "faults" and value == ())}
        return json.dumps(found, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Overrides:
        """Return the overrides of a text that `str` made. Raises `ConfigInvalid`."""
        try:
            given = json.loads(text)
            given["shorter"] = {int(number): float(for_s) for number, for_s in given.get("shorter", {}).items()}
            return cls(**given)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigInvalid("shrunk", f"{text!r} is not what a failure has printed: {error}") from error


class World:
    """A simulated world. `zbus.sim.world(seed=…)` makes one; use it with `async with`."""

    def __init__(
        self,
        seed: int = 0,
        *,
        overrides: Overrides | None = None,
        keep_trace: bool | int = False,
        converge_s: float = CONVERGE_S,
        limit_s: float = LIMIT_S,
        logs: Logs = "simulated",
    ) -> None:
        if logs not in ("simulated", "sqlite"):
            raise ConfigInvalid("logs", f"must be 'simulated' or 'sqlite', not {logs!r}")
        self._logs = logs
        self._real_logs: RealLogs | None = None
        if not isinstance(seed, int):
            raise ConfigInvalid("seed", f"must be a whole number, not {seed!r}")
        _check_seconds("converge_s", converge_s)
        _check_seconds("limit_s", limit_s)
        self.seed, self._overrides = seed, overrides or Overrides()
        self._converge_s, self._limit_s, self._keep_trace = converge_s, limit_s, keep_trace
        self.nodes: dict[str, SimNode] = {}
        self.nets: dict[str, SimNet] = {}
        self.disks: dict[str, Disk] = {}
        self.choices: dict[str, int] = {}  # what `choose` returned
        self.plan: Plan | None = None
        self.faults_injected: dict[str, int] = {}
        self.checks: list[Check] = []
        self._pid = FIRST_PID
        self._stack = ExitStack()
        self._background: list[asyncio.Task[Any]] = []
        self._knows: dict[tuple[str, str, str], bool] = {}

    # The parts that nodes use.

    def source(self, name: str) -> Random:
        """Return a random source of its own. The same name gives the same numbers, whatever else happens."""
        return Random(f"{self.seed}/{name}")

    def note(self, kind: str, node: str, *values: object) -> None:
        """Add a step to the trace."""
        self.trace.note(kind, node, *values)

    def disk(self, name: str) -> Disk:
        """Return the disk of a log, which is empty at first."""
        found = self.disks.get(name)
        if found is None:
            found = self.disks[name] = Disk(name, self.source(f"disk/{name}"))
            if self._real_logs is not None:
                found.real = self._real_logs.open(name, partial(self.ledger.broken, LOGS_EQUAL, name))
        return found

    def net(self, url: str) -> SimNet:
        """Return a transport. Nodes that use the same URL reach each other."""
        found = self.nets.get(url)
        if found is None:
            found = self.nets[url] = SimNet(url, self.loop, self.source, self.note)
            if self.plan is not None:
                found.set_conditions(self.plan.conditions)
        return found

    def next_pid(self) -> int:
        """Return a process id."""
        self._pid += 1
        return self._pid

    # Nodes.

    async def node(
        self,
        name: str,
        *,
        log: bool | str | None = None,
        program: Program | None = None,
        clock_ahead_s: float = 0.0,
        **settings: Any,
    ) -> SimNode:
        """Start a node and return it when its bus is open.

        `log`: True for a log of its own, a name for a log that another node had, None for none. `program`: a coroutine
        function that gets the bus; it runs again after each restart. `settings`: as for `zbus.open`; all nodes share
        one transport unless they name others.
        """
        self._check_entered()
        if program is not None and not callable(program):
            raise TypeError("program must be a function that gets the bus: give it without calling it")
        path = f"{name}.db" if log is True else log or None
        if not settings.keys() & {"transport", "transports"}:
            settings["transport"] = TRANSPORT
        config = BusConfig.exactly(log=path, node=name, **settings)
        return await self._add(SimNode(self, name, config, program, clock_ahead_s))

    def _check_entered(self) -> None:
        if not hasattr(self, "loop") or self.trace.ended:
            raise ZbusError("this world is not entered: use it inside of `async with zbus.sim.world(…) as world:`")

    async def bridge(
        self,
        name: str,
        between: tuple[str, str],
        keys: Iterable[str],
        *,
        log: bool | str | None = None,
        **settings: Any,
    ) -> SimNode:
        """Start a bridge between two transports. Options as for `zbus.Bridge`."""
        path = f"{name}.db" if log is True else log or None
        config = BridgeConfig(between=between, keys=tuple(keys), log=path, name=name, **settings)
        return await self._add(SimNode(self, name, config, None, 0.0))

    async def _add(self, node: SimNode) -> SimNode:
        if node.name in self.nodes:
            raise ConfigInvalid("name", f"this world has a node {node.name!r} already")
        if node.disk is not None:
            others = [each.name for each in self.nodes.values() if each.disk is node.disk]
            if others:
                raise ConfigInvalid("log", f"{node.disk.name!r} is the log of node {others[0]!r}")
            node.disk.point = partial(self._at_step, node, node.disk)
        self.nodes[node.name] = node
        self._knows.clear()
        return await node.start()

    def _at_step(self, node: SimNode, disk: Disk, step: str) -> None:
        """A process has reached a step at which a fault may be aimed."""
        if step == "acknowledged":
            self.note(step, node.name, *[f"{name} up to {cursor.offset}" for name, cursor in disk.cursors.items()])
        self.actions.at_step(node, step)

    # Time.

    async def run(self, seconds: float) -> None:
        """Let time pass."""
        _check_seconds("seconds", seconds)
        await asyncio.sleep(seconds)

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self.loop.time()

    async def until(self, condition: Callable[[], object], within_s: float = CONVERGE_S) -> None:
        """Wait until a condition is true. Raises `WorldStuck` if it is not within `within_s` seconds."""
        if not callable(condition) or iscoroutinefunction(condition):
            raise TypeError("condition must be a function without arguments that is not `async`, such as lambda: found")
        deadline = self.now + within_s
        while not condition():
            if self.now >= deadline:
                raise WorldStuck(f"the condition was not true within {within_s:g} s", self.loop)
            await asyncio.sleep(0.05)

    # Chance.

    def choose(self, name: str, least: int, most: int) -> int:
        """Return a number from the seed, both ends included. Shrinking a failure makes it smaller."""
        if not (isinstance(least, int) and isinstance(most, int) and least <= most):
            raise ConfigInvalid(name, f"must be between two whole numbers, the smaller one first: {least!r}, {most!r}")
        given = self._overrides.choices.get(name)
        number = self.source(f"choice/{name}").randint(least, most) if given is None else max(least, given)
        self.choices[name] = number
        return number

    # Faults.

    async def play(self, faults: Faults, seconds: float) -> None:
        """Let the faults that the seed draws happen during the next `seconds` seconds, and wait for their end."""
        _check_seconds("seconds", seconds)
        if not isinstance(faults, Faults):
            raise TypeError(f"faults must be zbus.sim.Faults, such as zbus.sim.ORDINARY, not {faults!r}")
        if not self.nodes:
            raise ConfigInvalid("faults", "this world has no nodes yet: add them before play")
        plan = self._overrides.apply(faults.plan(self.source("plan"), seconds))
        self.plan = plan
        for net in self.nets.values():
            net.set_conditions(plan.conditions)
        if plan.conditions.drop or plan.conditions.duplicate:
            self.note("fault", "", "conditions", *plan.conditions)
        begun = self.now
        playing = [self._spawn(self._play(fault, begun)) for fault in plan.faults]
        await asyncio.sleep(seconds)
        for each in playing:
            await each
        await self.heal()

    async def _play(self, fault: Fault, begun: float) -> None:
        await asyncio.sleep(begun + fault.at_s - self.now)
        await self.actions.inject(fault)

    def injected(self, kind: str, *values: object) -> None:
        """Count a fault."""
        self.faults_injected[kind] = self.faults_injected.get(kind, 0) + 1
        self.note("fault", "", kind, *values)

    def partition(self, one: SimNode, other: SimNode, *, both_ways: bool = True) -> None:
        """Cut the way from one node to another, and back, on every transport."""
        if one is other:
            raise ConfigInvalid("partition", f"{one.name!r} cannot be cut off from itself; isolate cuts a node off")
        self._cut(one, other, both_ways, True)
        self.injected("partition" if both_ways else "one_way", one.name, other.name)

    def isolate(self, node: SimNode) -> None:
        """Cut a node off from all others. `mend` ends it, for each of them."""
        _check_node(node)
        for other in self.nodes.values():
            self._cut(node, other, True, True)
        self.injected("isolate", node.name)

    def mend(self, one: SimNode, other: SimNode) -> None:
        """End a partition."""
        self._cut(one, other, True, False)
        self.note("mended", "", one.name, other.name)

    def _cut(self, one: SimNode, other: SimNode, both_ways: bool, cut: bool) -> None:
        _check_node(one)
        _check_node(other)
        for net in self.nets.values():
            net.way(one.name, other.name).cut = cut
            if both_ways:
                net.way(other.name, one.name).cut = cut

    def disconnect(self, node: SimNode) -> None:
        """Take the transports of a node down: sending raises, and nothing arrives."""
        _check_node(node)
        self.injected("disconnect", node.name)
        for fabric in node.fabrics:
            fabric.disconnected = True

    def reconnect(self, node: SimNode) -> None:
        """End `disconnect`."""
        for fabric in node.fabrics:
            fabric.disconnected = False
        self.note("connected", node.name)

    def conditions(self, **changed: Any) -> None:
        """Set the conditions of all links: `drop`, `duplicate`, `delay_s`, `bytes_per_s`."""
        _check_conditions(changed)
        for net in self.nets.values():
            net.set_conditions(net.conditions._replace(**changed))
        self.note("fault", "", "conditions", changed)

    async def heal(self) -> None:
        """End all faults: mend the network and the disks, thaw what is frozen, start what is down."""
        self.actions.disarm()
        for net in self.nets.values():
            net.set_conditions(Conditions())
            for way in net.ways():
                way.cut = False
            for fabric in net.fabrics:
                fabric.disconnected = False
        for disk in self.disks.values():
            disk.mend()
        for node in list(self.nodes.values()):
            node.thaw()
        self.note("healed", "")
        for node in list(self.nodes.values()):
            if not node.is_alive and node.processes:
                await node.start()

    # Invariants.

    def invariant(self, check: Check) -> Check:
        """Add an invariant of your own: it is called every second and at the end, and returns what is wrong, or None.

        @world.invariant
        def no_order_is_billed_twice(world): ...
        """
        if iscoroutinefunction(check):
            raise TypeError(f"{check.__name__} must not be `async`: an invariant is called between two steps")
        self.checks.append(check)
        return check

    def without(self, *invariants: str) -> None:
        """Do not check some of the built-in invariants, given by name, because this world does not promise them."""
        for name in invariants:
            if name not in INVARIANTS:
                raise ConfigInvalid("invariant", f"there is no invariant {name!r}; known are: {'; '.join(INVARIANTS)}")
        self.ledger.unchecked.update(invariants)

    async def converge(self, within_s: float | None = None) -> None:
        """Wait until every open subscription has what it is owed and no node has work left."""
        await self._invariants.converge(self._converge_s if within_s is None else within_s)

    def reaches(self, source: str, target: str, key: str) -> bool:
        """Return whether events of a node can reach another one: over a transport, or over bridges."""
        found = self._knows.get((source, target, key))
        if found is None:
            topology = Topology({name: node.config for name, node in self.nodes.items()})
            found = topology.path(Sample(source, key), target) is not None
            self._knows[source, target, key] = found
        return found

    # The beginning and the end.

    async def __aenter__(self) -> World:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimLoop):
            raise ZbusError("a simulated world needs virtual time: run it with zbus.sim.run(main()), not asyncio.run")
        self.loop = loop
        if self._logs == "sqlite":
            self._real_logs = RealLogs()
            self._stack.callback(self._real_logs.close)
        self._stack.enter_context(boundary(loop, self._time_ns, self.source("machine")))
        self.trace = Trace(loop.time, self._keep_trace)
        self.ledger = Ledger(loop.time, self.note)
        self.ledger.reaches = self.reaches
        self.actions = FaultActions(self)
        self._invariants = Invariants(self)
        self.ledger.counted = self._invariants.counted
        loop.set_exception_handler(self._exception)
        loop.limit_s = self._limit_s
        loop.set_default_executor(self._executor)
        loop.at_close.append(self._stack.close)  # if the run is interrupted, `__aexit__` is not called
        silent = records.logger.disabled
        records.logger.disabled = True
        self._stack.callback(setattr, records.logger, "disabled", silent)
        self._stack.callback(records.listen(logging.INFO, self._record))
        self._spawn(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):
            return  # the run was interrupted, and its loop is gone
        try:
            if error is None:
                await self.heal()
                await self.converge()
                self._invariants.check_end()
                for node in self.nodes.values():
                    await node.stop()
        finally:
            await self._end()
        if error is not None:
            error.add_note(f"seed {self.seed}")
        elif self.ledger.violations:
            raise InvariantBroken(self.seed, self.ledger.violations)

    def _executor(self) -> Executor:
        """Return the threads of the process that runs now, for `asyncio.to_thread`."""
        process = current_process.get()
        for node in self.nodes.values():
            if node.process is process:
                return node.executor
        raise WorldBoundary("asyncio.to_thread() outside of a node", "call it in the program of a node")

    def _time_ns(self) -> int:
        return EPOCH_NS + int(self.loop.time() * 1e9)

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self.loop.create_task(coroutine)
        self._background.append(task)
        return task

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._invariants.check()

    def _exception(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, (InvariantBroken, WorldStuck)):
            raise error
        if not self.trace.ended:
            self.ledger.broken(NO_EXCEPTION, "", f"{context.get('message')}: {error!r}")

    def _record(self, level: int, fields: dict[str, Any]) -> None:
        shown = {name: value for name, value in fields.items() if name not in ("correlation_id", "record")}
        self.note("record", "", fields["record"], shown)
        process = current_process.get()
        if level >= logging.ERROR and process is not None:
            self.ledger.last_errors[process.node] = (
                f"{fields['record']} {fields.get('error', fields.get('reason', ''))}"
            )
        if fields.get("code") in RANGES_MISSED and process is not None:
            self.ledger.range_reported(process.node, fields["origin"], fields["after"], fields["until"])

    async def _end(self) -> None:
        """Stop the trace, and let everything that is left end. None of it has an effect."""
        self.trace.ended = True
        self._stack.close()
        tasks = [*self._background]
        for process in [process for node in self.nodes.values() for process in node.processes]:
            process.kill()
            process.kept.clear()
            process.halted = False
            tasks += process.tasks
        for task in tasks:
            task.cancel()
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        for task in tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                if iscoroutine(coroutine) and getcoroutinestate(coroutine) == CORO_CREATED:
                    coroutine.close()  # its process was killed before its first step
        # Events are invisible to the garbage collector, and lead to disks and contexts.
        self.ledger.forget()
        for disk in self.disks.values():
            disk.detach()
        for node in self.nodes.values():
            node.forget()


def _check_node(node: object) -> None:
    if not isinstance(node, SimNode):
        raise ConfigInvalid("node", f"must be what `await world.node(…)` returned, not {node!r}")


def _check_conditions(changed: Mapping[str, Any]) -> None:
    for name, value in changed.items():
        if name not in Conditions._fields:
            known = ", ".join(Conditions._fields)
            raise ConfigInvalid(name, f"there is no such condition; known are: {known}")
        if name == "delay_s":
            right = isinstance(value, tuple) and len(value) == 2 and 0 <= value[0] <= value[1]
            wanted = "the shortest and the longest delay in seconds, such as (0.001, 0.05)"
        else:
            most = math.inf if name == "bytes_per_s" else 1
            right = isinstance(value, (int, float)) and 0 <= value <= most
            wanted = "a number of bytes per second" if name == "bytes_per_s" else "a probability between 0 and 1"
        if not right:
            raise ConfigInvalid(name, f"must be {wanted}, not {value!r}")


def _check_seconds(name: str, seconds: float) -> None:
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ConfigInvalid(name, f"must be a number of seconds that is not negative, not {seconds!r}")
