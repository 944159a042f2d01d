"""The effect of each kind of fault on a world."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from typing import Any, Protocol

from zbus.errors import ConfigInvalid

from .faults import STEPS, Fault
from .ledger import Ledger
from .machine.disk import Disk
from .machine.fabric import SimNet
from .machine.hostile import forged_beacons, malformed_frames
from .node import SimNode

CLOCK_S = (5.0, 30.0)
SLOW_BYTES_PER_S = (2_000.0, 200_000.0)
SLOW_SYNC_S = (0.01, 0.5)
SLOW_AIM_S = (0.05, 0.3)  # a slow disk makes the steps that are aimed at longer
HOPELESS_S = 5.0  # an aimed fault is given up if the step is not reached within this time
FRAMES = 40  # of a stranger


class Faulty(Protocol):
    """The world, as faults need it."""

    ledger: Ledger
    nodes: dict[str, SimNode]
    nets: dict[str, SimNet]
    disks: dict[str, Disk]

    async def node(self, name: str, **options: Any) -> SimNode:
        """Start a node."""

    def source(self, name: str) -> Random:
        """Return a random source of its own."""

    def note(self, kind: str, node: str, *values: object) -> None:
        """Add a step to the trace."""

    def injected(self, kind: str, *values: object) -> None:
        """Count a fault."""

    def partition(self, one: SimNode, other: SimNode, *, both_ways: bool = True) -> None:
        """Cut the way between two nodes."""

    def isolate(self, node: SimNode) -> None:
        """Cut a node off from all others."""

    def mend(self, one: SimNode, other: SimNode) -> None:
        """End a partition."""

    def disconnect(self, node: SimNode) -> None:
        """Take the transports of a node away."""

    def reconnect(self, node: SimNode) -> None:
        """End a disconnection."""


class FaultActions:
    """Injects faults. Each action ends its fault again after `for_s` seconds."""

    def __init__(self, world: Faulty) -> None:
        self._world = world
        self._aimed: dict[str, tuple[str, int, Callable[[], None]]] = {}  # by node: the step, how often, and what to do
        self._kinds: dict[str, Callable[[Fault, SimNode, SimNode | None], Awaitable[None]]] = {
            "partition": self._partition,
            "one_way": self._one_way,
            "isolate": self._isolate,
            "kill": self._kill,
            "restart": self._restart,
            "power_cut": self._power_cut,
            "freeze": self._freeze,
            "disconnect": self._disconnect,
            "slow_link": self._slow_link,
            "slow_disk": self._slow_disk,
            "disk_full": self._disk_full,
            "disk_errors": self._disk_errors,
            "clock": self._clock,
            "aimed_kill": self._aimed_kill,
            "restore": self._restore,
            "clone": self._clone,
            "corrupt": self._corrupt,
            "malformed": self._malformed,
            "forge": self._forge,
        }

    async def inject(self, fault: Fault) -> None:
        """Let a fault happen, and end it after its time."""
        nodes = list(self._world.nodes.values())
        if not nodes:
            raise ConfigInvalid("faults", "this world has no node that could fail; start one first")
        node = nodes[int(fault.node * len(nodes))]
        others = [each for each in nodes if each is not node]
        other = others[int(fault.other * len(others))] if others else None
        await self._kinds[fault.kind](fault, node, other)

    # Aimed faults.

    def aim(self, node: SimNode, step: str, number: int, action: Callable[[], None]) -> None:
        """Call `action` at the `number`th time from now on that a node reaches a named step."""
        if step not in STEPS:
            raise ValueError(f"there is no step {step!r}; known are: {', '.join(STEPS)}")
        self._aimed[node.name] = step, number, action

    def at_step(self, node: SimNode, step: str) -> None:
        """A node has reached a named step."""
        aimed = self._aimed.get(node.name)
        if aimed is None or aimed[0] != step:
            return
        if step == "position stored" and (node.disk is None or not node.disk.writing):
            return  # only while a commit is pending: then the position may be ahead of the log
        _, number, action = aimed
        if number > 1:
            self._aimed[node.name] = step, number - 1, action
            return
        del self._aimed[node.name]
        action()

    def disarm(self) -> None:
        """Give up all aimed faults."""
        self._aimed.clear()

    # The network.

    async def _partition(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if other is not None:
            self._world.partition(node, other)
            await asyncio.sleep(fault.for_s)
            self._world.mend(node, other)

    async def _one_way(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if other is not None:
            self._world.partition(node, other, both_ways=False)
            await asyncio.sleep(fault.for_s)
            self._world.mend(node, other)

    async def _isolate(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        self._world.isolate(node)
        await asyncio.sleep(fault.for_s)
        for each in list(self._world.nodes.values()):
            self._world.mend(node, each)

    async def _disconnect(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        self._world.disconnect(node)
        await asyncio.sleep(fault.for_s)
        self._world.reconnect(node)

    async def _slow_link(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if other is None:
            return
        low, high = SLOW_BYTES_PER_S
        rate = low * (high / low) ** fault.strength
        self._world.injected("slow_link", node.name, other.name, int(rate))
        ways = [net.way(node.name, other.name) for net in self._world.nets.values()]
        for way in ways:
            way.conditions = way.conditions._replace(bytes_per_s=rate)
        await asyncio.sleep(fault.for_s)
        for way in ways:
            way.conditions = way.conditions._replace(bytes_per_s=0.0)

    async def _malformed(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        self._world.injected("malformed", node.name)
        await self._inject(fault, node, malformed_frames(self._world.source(f"malformed/{fault.at_s}"), FRAMES))

    async def _forge(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        self._world.injected("forge", node.name)
        disks = [each.disk for each in self._world.nodes.values() if each.disk is not None and each is not node]
        await self._inject(fault, node, forged_beacons(disks, self._world.source(f"forge/{fault.at_s}"), FRAMES))

    async def _inject(self, fault: Fault, node: SimNode, frames: Iterator[tuple[str, bytes]]) -> None:
        for key, frame in frames:
            for net in self._world.nets.values():
                net.inject(node.name, key, frame)
            await asyncio.sleep(fault.for_s / FRAMES)

    # Processes.

    async def _kill(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if node.is_alive:
            self._world.injected("kill", node.name)
            node.kill()
            await self._start_after(node, fault.for_s)

    async def _power_cut(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if node.is_alive:
            self._world.injected("power_cut", node.name)
            node.kill(power_cut=True)
            await self._start_after(node, fault.for_s)

    async def _restart(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if node.is_alive:
            self._world.injected("restart", node.name)
            await node.stop()
            await self._start_after(node, fault.for_s)

    async def _freeze(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if node.is_alive:
            self._world.injected("freeze", node.name)
            node.freeze()
            await asyncio.sleep(fault.for_s)
            node.thaw()

    async def _aimed_kill(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        steps = list(STEPS)
        step, number = steps[int(fault.strength * len(steps))], 1 + int(fault.other * 5)
        killed = asyncio.Event()
        process = node.process

        def kill() -> None:
            if node.process is process and node.is_alive:
                self._world.injected("aimed_kill", node.name, step)
                node.kill()
            killed.set()

        if node.disk is not None:
            node.disk.fsync_s = SLOW_AIM_S
            self.aim(node, step, number, kill)
            try:
                async with asyncio.timeout(HOPELESS_S):
                    await killed.wait()
            except TimeoutError:
                self._aimed.pop(node.name, None)
            node.disk.mend()
            if not node.is_alive:
                await self._start_after(node, fault.for_s)

    async def _start_after(self, node: SimNode, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if not node.is_alive:
            await node.start()

    # Disks and clocks.

    async def _slow_disk(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if node.disk is not None:
            low, high = SLOW_SYNC_S
            slowest = low * (high / low) ** fault.strength
            self._world.injected("slow_disk", node.name, round(slowest, 3))
            node.disk.fsync_s = (slowest / 2, slowest)
            await asyncio.sleep(fault.for_s)
            node.disk.mend()

    async def _disk_full(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if node.disk is not None:
            self._world.injected("disk_full", node.name)
            node.disk.full = True
            await asyncio.sleep(fault.for_s)
            node.disk.mend()

    async def _disk_errors(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        if node.disk is not None:
            self._world.injected("disk_errors", node.name)
            node.disk.refuse_p = node.disk.unknown_p = 0.1 + fault.strength / 3
            await asyncio.sleep(fault.for_s)
            node.disk.mend()

    async def _clock(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        by_s = CLOCK_S[int(fault.strength * 4) % 2] * (1 if fault.strength < 0.5 else -1)
        self._world.injected("clock", node.name, by_s)
        node.clock.skew_ns += int(by_s * 1e9)
        await asyncio.sleep(0)

    async def _corrupt(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        disk = node.disk
        if disk is not None and disk.rows:
            at = int(fault.strength * len(disk.rows))
            self._world.injected("corrupt", node.name, disk.offset_of(at))
            disk.corrupt.add(disk.offset_of(at))
            self._world.ledger.excuse([disk.rows[at]])
        await asyncio.sleep(0)

    async def _restore(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        """Copy the log now, and put the copy back later, while the node is down."""
        if node.disk is None:
            return
        copy = node.disk.copy()
        await asyncio.sleep(fault.for_s)
        if not node.is_alive:
            return
        await node.stop()
        self._world.injected("restore", node.name, copy.head, node.disk.head)
        node.disk.restore(copy)
        self._world.ledger.log_replaced(node.disk, self._world.disks.values())
        await self._start_after(node, 0.5)

    async def _clone(self, fault: Fault, node: SimNode, other: SimNode | None) -> None:
        """Start a second node with a copy of the log: both have the same log id from now on."""
        name = f"{node.name}-clone"
        if node.disk is None or name in self._world.nodes:
            return
        self._world.injected("clone", node.name, node.disk.head)
        self._world.disks[f"{name}.db"] = copy = node.disk.copy()
        copy.name, copy.chance = f"{name}.db", self._world.source(f"disk/{name}.db")
        self._world.ledger.log_replaced(copy, self._world.disks.values())
        clone = await self._world.node(name, log=True)
        for program in node.programs:
            clone.also(program)
