"""The invariants of every world: checked while it runs, when it has converged, and at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from zbus.bridge.config import BridgeConfig
from zbus.deliver.subscriber import PAGE_EVENTS_MIN
from zbus.mesh.buffered_events import BUFFERED_EVENTS_MAX
from zbus.mesh.inbox import PEERS_MAX
from zbus.mesh.peer import KEYS_MAX
from zbus.mesh.send_queue import BACKLOG_EVENTS_MAX
from zbus.node import Node

from .errors import told
from .ledger import CONVERGES, MEMORY, NO_EXCEPTION, Ledger
from .machine.loop import has_failed
from .node import SimNode

POLL_S = 0.1
PASSED_MAX = 100_000  # identities of events that are being stored


class Checked(Protocol):
    """The world, as the invariants need it."""

    ledger: Ledger
    nodes: dict[str, SimNode]
    checks: list[Callable[[Any], str | None]]

    @property
    def now(self) -> float:
        """The virtual time."""

    def note(self, kind: str, node: str, *values: object) -> None:
        """Add a step to the trace."""


class Invariants:
    """Checks one world. Violations go to the ledger, each of them once."""

    def __init__(self, world: Checked) -> None:
        self._world = world
        self._reported: set[tuple[str, str]] = set()

    def check(self) -> None:
        """Check what must hold at any time."""
        for node in self._world.nodes.values():
            if node.is_alive:
                self._check_memory(node)
        self._check_own()

    def check_end(self) -> None:
        """Check what must hold at the end."""
        self.check()
        self._check_tasks()

    async def converge(self, within_s: float) -> None:
        """Wait until nothing is owed and nothing is left to do; report what is, after `within_s` seconds."""
        world = self._world
        deadline = world.now + within_s
        while True:
            unfinished = [] if world.ledger.owed() else self._unfinished()
            if not world.ledger.owed() and not unfinished:
                world.note("converged", "")
                return
            if world.now >= deadline:
                break
            await asyncio.sleep(POLL_S)
        world.ledger.report_owed()
        for node, what in self._unfinished():
            world.ledger.broken(CONVERGES, node, f"{what}, {within_s:g} s after the faults ended")

    def counted(self, name: str, counter: str) -> int:
        """Return a counter of a node, since its last start."""
        inside = _inside(self._world.nodes[name])
        return int(inside.stats.counts().get(counter, 0)) if inside is not None else 0

    def _check_tasks(self) -> None:
        """Report tasks that failed without anything that noticed it."""
        for node in self._world.nodes.values():
            for task in [task for process in node.processes for task in process.tasks if has_failed(task)]:
                error = task.exception()
                assert error is not None
                what = f"a task raised {told(error)}, and nothing awaited it"
                self._world.ledger.broken(NO_EXCEPTION, node.name, what)

    def _check_own(self) -> None:
        for check in self._world.checks:
            wrong = check(self._world)
            if wrong:
                self._once(getattr(check, "__name__", "an invariant").replace("_", " "), "", wrong)

    def _check_memory(self, node: SimNode) -> None:
        inside = _inside(node)
        if inside is None:
            return
        for subscription in inside.dispatcher.subscriptions:
            reader = subscription.subscriber
            most = reader.queue_events if reader.is_live else max(reader.queue_events, PAGE_EVENTS_MIN)
            if reader.overflow != "block" and reader.queued > most:
                self._once(MEMORY, node.name, f"a queue for {reader.queue_events} events holds {reader.queued}")
        if len(inside.dispatcher.passed) > PASSED_MAX:
            self._once(MEMORY, node.name, "too many events count as being stored")
        network = inside.network
        if network is None:
            return
        for link in network.links:
            if link.send_queue.waiting > BACKLOG_EVENTS_MAX:
                self._once(MEMORY, node.name, f"{link.send_queue.waiting} events wait to be sent")
        peers = network.inbox._peers
        if len(peers) > PEERS_MAX:
            self._once(MEMORY, node.name, f"{len(peers)} peers are known")
        for peer in peers.values():
            if len(peer._buffered) > BUFFERED_EVENTS_MAX or len(peer._last) > KEYS_MAX:
                self._once(MEMORY, node.name, f"peer {peer.id:x} holds {len(peer._buffered)} events")

    def _unfinished(self) -> list[tuple[str, str]]:
        """Return what nodes have left to do: by node, in words."""
        found = []
        for node in self._world.nodes.values():
            inside = _inside(node)
            if inside is None:
                continue
            name = node.name
            if inside.backpressure.blocked:
                found.append((name, "publishers are blocked"))
            if inside.commits is not None and inside.commits.pending_bytes:
                found.append((name, "events wait for a commit"))
            if inside.dispatcher.passed:
                found.append((name, f"{len(inside.dispatcher.passed)} events count as being stored"))
            if inside.stats.counts().get("gaps_open", 0):
                found.append((name, f"{inside.stats.counts()['gaps_open']} gaps are open"))
            network = inside.network
            if network is None:
                continue
            if network.inbox._undelivered:
                found.append((name, f"{len(network.inbox._undelivered)} received events are not stored"))
            for link in network.links:
                if link.send_queue.waiting:
                    found.append((name, f"{link.send_queue.waiting} events wait to be sent"))
            for peer in network.inbox._peers.values():
                if peer._repairing is not None and self._is_present(peer.id):
                    found.append((name, f"a repair of log {peer.id:x} runs"))
        return found

    def _is_present(self, origin: int) -> bool:
        """Return whether a node with this log runs: a repair of a log that is gone for good never ends."""
        return any(
            inside.network is not None and inside.network.origin == origin
            for node in self._world.nodes.values()
            if (inside := _inside(node)) is not None
        )

    def _once(self, invariant: str, node: str, what: str) -> None:
        if (invariant, node) not in self._reported:
            self._reported.add((invariant, node))
            self._world.ledger.broken(invariant, node, what)


def _inside(node: SimNode) -> Node | None:
    if not node.is_alive:
        return None
    return node.bridge._node if isinstance(node.config, BridgeConfig) else node.bus._node
