"""A transport of the contract suite: it opens nodes here and elsewhere, and can lose and mend its middle.

A `Mesh` is one transport with whatever server stands in its middle. Nodes are opened per test; the server and the
other processes live as long as the run, since nothing of them outlasts the nodes. Each transport is a subclass, in
`contract_transports.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from contract_far import FarNode, FarProcess
from contract_node import Node

from zbus.config import BusConfig
from zbus.plugins import open_fabric

AnyNode = Node | FarNode


class Processes:
    """Child processes, used again by later tests unless they were killed."""

    def __init__(self) -> None:
        self._idle: list[FarProcess] = []
        self._all: list[FarProcess] = []

    def take(self) -> FarProcess:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
        process = FarProcess()
        self._all.append(process)
        return process

    def give_back(self, process: FarProcess) -> None:
        self._idle.append(process)

    def end(self) -> None:
        for process in self._all:
            process.end()


class Attack(NamedTuple):
    """Where bad input goes: the key that is subscribed to, and the one that is served."""

    key: str
    answered: str
    send: Callable[[], object]  # has a genuine frame sent on the key, for those who watch how
    reached: Callable[[], bool]  # whether `hostile.INJECTED` has arrived; waits a moment


class Mesh:
    """A transport. `name` is the one in the test's id."""

    name = ""
    embedded = False
    has_middle = False  # a server of its own, which an outage is of

    def __init__(self, directory: Path, processes: Processes) -> None:
        self.directory, self.processes = directory, processes
        self.near: list[Node] = []
        self.far: list[FarNode] = []
        self._cut: FarNode | None = None

    # --- for each transport to say

    def start(self) -> None:
        """Start what stands in the middle."""

    def stop(self) -> None:
        """End what stands in the middle."""

    def settings(self) -> tuple[dict[str, Any], str]:
        """The configuration and the URL of a further node."""
        raise NotImplementedError

    def kill_middle(self) -> None:
        """kill -9 what stands in the middle."""
        raise NotImplementedError

    def restart_middle(self) -> None:
        """Start it again, where it was."""
        raise NotImplementedError

    def opened(self, config: dict[str, Any]) -> None:
        """Note that a node with these settings is open in this process."""

    def inject(self, attack: Attack) -> None:
        """Put bad input on the wire below the fabric, and return when it has arrived."""
        raise NotImplementedError

    # --- outages

    def cut(self, far: FarNode) -> None:
        """Begin an outage: kill -9 the middle. Where there is none, kill the far process."""
        self._cut = far
        self.kill_middle() if self.has_middle else far.kill()

    def mend(self, far: FarNode) -> FarNode:
        """End the outage. The node to go on with: the same, or what replaces a killed one."""
        self._cut = None
        if self.has_middle:
            self.restart_middle()
            return far
        self._drop(far)
        return self.spawn(far.config, far.url)

    # --- nodes

    def open(self) -> Node:
        """A node in this process."""
        config, url = self.settings()
        node = Node(open_fabric(BusConfig(**config), url))
        self.near.append(node)
        self.opened(config)
        return node

    def spawn(self, config: dict[str, Any] | None = None, url: str = "") -> FarNode:
        """A node in another process."""
        if config is None:
            config, url = self.settings()
        node = FarNode(self.processes.take(), config, url)
        self.far.append(node)
        return node

    def clear(self) -> None:
        """Close what a test left open, and fail if a far process still has threads of zbus then."""
        if self._cut is not None:  # a test that failed
            self.mend(self._cut)
        near, self.near = self.near, []
        for node in near:
            node.close()
        threads: list[str] = []
        for far in list(self.far):
            threads += self._drop(far)
        assert not threads, f"threads left in the other process: {threads}"

    def _drop(self, far: FarNode) -> list[str]:
        self.far.remove(far)
        if not far.process.alive:
            return []
        if not far.closed:
            far.close()
        deadline = time.monotonic() + 5.0
        while (left := far.threads()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            far.process.end()
        else:
            self.processes.give_back(far.process)
        return left
