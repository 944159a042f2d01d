"""Nodes as processes, the transports between them, and what their facts must add up to.

A `Node` is one process with one bus and, usually, a log; it can be killed, frozen and started again on the same log.
A `Wire` is a transport with whatever stands in its middle. `Facts` reads what nodes noted and checks the promises:
nothing acknowledged is lost, nothing comes twice, the order of each publisher is kept.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from nats_support import NatsServer

from zbus_log.file import sqlite_driver

CALL_S = 60.0
CHILD = Path(__file__).with_name("mesh_child.py")


class NodeDied(AssertionError):
    """The process ended, or was killed, while a call was waiting for its answer."""


class Node:
    """A process with a bus. `stop` ends it whatever state it is in."""

    child = CHILD

    def __init__(self, directory: Path, name: str, wire: Wire, *, log: bool = True, **settings: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name, self.wire, self._settings = name, wire, settings
        self.log = str(directory / f"{name}.db") if log else None
        self.facts_path = directory / f"{name}.facts"
        self._stderr_path = directory / f"{name}.stderr"
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._last = 0
        self._reader: threading.Thread | None = None

    def start(self, **settings: Any) -> Node:
        """Start the process and open its bus."""
        with self._stderr_path.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, str(self.child), str(self.facts_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._answers.clear()
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        self._wait(0)
        self.call("open", self.log, self.wire.settings(self.name) | self._settings | settings)
        return self

    def call(self, call: str, *arguments: Any, wait_s: float = CALL_S, **named: Any) -> Any:
        """Have the process do something, and wait for the result."""
        return self.result(self.begin(call, *arguments, **named), wait_s)

    def begin(self, call: str, *arguments: Any, **named: Any) -> int:
        """Have the process do something; `result` waits for it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._last += 1
        request = {"id": self._last, "call": call, "arguments": arguments, "named": named}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._last

    def result(self, number: int, wait_s: float = CALL_S) -> Any:
        reported = self._wait(number, wait_s)
        assert "error" not in reported, f"{self.name}: {reported['error']}\n{self.stderr()}"
        return reported["result"]

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._gone()

    def freeze(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)
            self.kill()

    def stderr(self) -> str:
        return self._stderr_path.read_text()[-4000:]

    @property
    def facts(self) -> Facts:
        return Facts(self.facts_path)

    def positions(self) -> dict[str, int]:
        """How far this node is with others, as its files say."""
        with closing(sqlite_driver.connect(f"file:{self.log}-cursors?mode=ro")) as connection:
            return dict(connection.execute("SELECT name, position FROM positions"))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _gone(self) -> None:
        assert self._process is not None
        assert self._reader is not None
        self._process.wait(20)
        self._reader.join(20)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        self._process = None

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            reported = json.loads(line)
            with self._changed:
                self._answers[reported["id"]] = reported
                self._changed.notify_all()
        with self._changed:
            self._answers[-1] = {}
            self._changed.notify_all()

    def _wait(self, number: int, wait_s: float = CALL_S) -> dict[str, Any]:
        with self._changed:
            came = self._changed.wait_for(lambda: number in self._answers or -1 in self._answers, wait_s)
            assert came, f"{self.name} gave no answer within {wait_s:g} s\n{self.stderr()}"
            if number not in self._answers:
                raise NodeDied(f"{self.name} ended:\n{self.stderr()}")
            return self._answers.pop(number)


class Facts:
    """What a node noted so far."""

    def __init__(self, path: Path) -> None:
        self.lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def published(self) -> dict[int, list[int]]:
        """The acknowledged sequences of each publisher."""
        found: dict[int, list[int]] = defaultdict(list)
        for line in self.lines:
            if line[0] == "published":
                found[int(line[1])].append(int(line[2]))
        return found

    def seen(self, name: str) -> list[tuple[int, int]]:
        """The identities that a subscription saw, in order, over all restarts."""
        return [(int(line[2]), int(line[3])) for line in self.lines if line[0] == "seen" and line[1] == name]

    def of(self, kind: str) -> list[list[str]]:
        return [line[1:] for line in self.lines if line[0] == kind]

    def check_durable(self, name: str) -> None:
        """Within one run of the process the order is kept and nothing comes twice; after an acknowledgement, never."""
        acked = 0
        last: dict[int, int] = {}
        last_offset = 0
        for line in self.lines:
            if line[0] == "start" and line[1] == name:
                last, last_offset = {}, acked
            elif line[0] == "seen" and line[1] == name:
                publisher, sequence, offset = map(int, line[2:5])
                assert offset > acked, f"offset {offset} came again after {acked} was acknowledged"
                assert offset > last_offset, f"offset {offset} came after {last_offset}"
                assert sequence > last.get(publisher, -1), f"{publisher}: {sequence} came after {last[publisher]}"
                last[publisher], last_offset = sequence, offset
            elif line[0] == "acked" and line[1] == name:
                acked = max(acked, int(line[2]))


def check_everything_came(published: dict[int, list[int]], seen: list[tuple[int, int]]) -> None:
    """Each acknowledged event was seen."""
    came = set(seen)
    missing = [(publisher, n) for publisher, all_ in published.items() for n in all_ if (publisher, n) not in came]
    total = sum(len(each) for each in published.values())
    assert not missing, f"{len(missing)} of {total} never came, such as {missing[:3]} … {missing[-3:]}"


def check_once_and_in_order(seen: list[tuple[int, int]]) -> None:
    """The sequences of each publisher rise: nothing twice, nothing out of order."""
    last: dict[int, int] = {}
    for at, (publisher, sequence) in enumerate(seen):
        assert sequence > last.get(publisher, -1), (
            f"{publisher}: {sequence} came after {last[publisher]}, as number {at} of {len(seen)}"
        )
        last[publisher] = sequence


def until(true: Callable[[], Any], wait_s: float = 30.0, what: str = "it") -> None:
    deadline = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come true within {wait_s:g} s"
        time.sleep(0.02)


def until_still(look: Callable[[], Any], still_s: float = 0.3, wait_s: float = 30.0) -> None:
    """Wait until something stays as it is for a while."""
    deadline, before, since = time.monotonic() + wait_s, look(), time.monotonic()
    while time.monotonic() - since < still_s:
        assert time.monotonic() < deadline, f"it still moves after {wait_s:g} s: {before}"
        time.sleep(0.05)
        now = look()
        if now != before:
            before, since = now, time.monotonic()


def until_seen(node: Node, name: str, published: Callable[[], dict[int, list[int]]], wait_s: float = 60.0) -> None:
    """Wait until a subscription saw everything that was acknowledged, or stopped seeing more of it."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        want = {(publisher, n) for publisher, all_ in published().items() for n in all_}
        if want <= set(node.facts.seen(name)):
            return
        time.sleep(0.1)
    check_everything_came(published(), node.facts.seen(name))


def at_once(*stories: Callable[[], None]) -> None:
    """Tell several stories at the same time, since each of them mostly waits; all failures are raised together."""
    with ThreadPoolExecutor(len(stories), "story") as threads:
        reported = [threads.submit(story) for story in stories]
        failed = [error for each in reported if (error := each.exception()) is not None]
    if failed:
        raise BaseExceptionGroup("some of the stories did not end well", failed)


# The transports.


class Wire:
    """A transport between nodes; `settings` are those of `zbus.open`."""

    name = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self) -> None:
        """Start what stands in the middle."""

    def stop(self) -> None:
        """End it."""

    def settings(self, name: str) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def url(self) -> str:
        """A URL that alone is enough to join, where there is one."""
        raise NotImplementedError


class ZenohPeers(Wire):
    """Nodes connect to those that were named before them; each keeps its port."""

    name = "zenoh"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._ports: dict[str, socket.socket] = {}

    def settings(self, name: str) -> dict[str, Any]:
        if name not in self._ports:
            self._ports[name] = reserved_port()
        endpoints = {each: f"tcp/127.0.0.1:{kept.getsockname()[1]}" for each, kept in self._ports.items()}
        earlier = list(endpoints)[: list(endpoints).index(name)]
        return {"mode": "peer", "listen": [endpoints[name]], "connect": [endpoints[each] for each in earlier]}

    def stop(self) -> None:
        for kept in self._ports.values():
            kept.close()


class Middle(Wire):
    """A transport with a process in its middle that can be killed, frozen and replaced."""

    def kill(self) -> None:
        raise NotImplementedError

    def revive(self) -> None:
        raise NotImplementedError

    def freeze(self) -> None:
        raise NotImplementedError

    def thaw(self) -> None:
        raise NotImplementedError


class ZenohRouter(Middle):
    """A router process of ours in the middle, and every node a client of it."""

    name = "zenoh-router"

    def start(self) -> None:
        self._kept = reserved_port()
        self.port = self._kept.getsockname()[1]
        self._router: Node | None = None
        self.revive()

    def revive(self) -> None:
        self._router = Node(self.directory, f"router-{self.port}", _Fixed(self._listening()), log=False).start()

    def _listening(self) -> dict[str, Any]:
        return {"mode": "router", "listen": [f"tcp/127.0.0.1:{self.port}"]}

    def kill(self) -> None:
        assert self._router is not None
        self._router.kill()
        self._router = None

    def freeze(self) -> None:
        assert self._router is not None
        self._router.freeze()

    def thaw(self) -> None:
        assert self._router is not None
        self._router.thaw()

    def stop(self) -> None:
        if self._router is not None:
            self._router.stop()
        self._kept.close()

    def settings(self, name: str) -> dict[str, Any]:
        return {"transport": self.url}

    @property
    def url(self) -> str:
        return f"zenoh://127.0.0.1:{self.port}"


class Nats(Middle):
    """A real nats-server in the middle."""

    name = "nats"

    def start(self) -> None:
        self.server = NatsServer(self.directory / "nats").start()

    def revive(self) -> None:
        self.server.start()

    def kill(self) -> None:
        self.server.kill()

    def freeze(self) -> None:
        self.server.freeze()

    def thaw(self) -> None:
        self.server.thaw()

    def stop(self) -> None:
        self.server.stop()

    def settings(self, name: str) -> dict[str, Any]:
        return {"transport": self.url}

    @property
    def url(self) -> str:
        return self.server.url


class Zmq(Wire):
    """Sockets from process to process, found by a folder."""

    name = "zmq"

    def settings(self, name: str) -> dict[str, Any]:
        return {"transport": self.url}

    @property
    def url(self) -> str:
        return f"zmq://?registry={self.directory / 'registry'}"


class _Fixed(Wire):
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def settings(self, name: str) -> dict[str, Any]:
        return self._settings


WIRES: list[type[Wire]] = [ZenohPeers, Nats, Zmq]
WITH_MIDDLE: list[type[Middle]] = [ZenohRouter, Nats]


class Mesh:
    """One transport and the nodes on it; all of them end with the test."""

    def __init__(self, directory: Path, wire: Wire) -> None:
        self.directory, self.wire = directory, wire
        self.nodes: list[Node] = []

    def node(
        self, name: str, *, wire: Wire | None = None, log: bool = True, start: bool = True, **settings: Any
    ) -> Node:
        node = Node(self.directory, name, wire or self.wire, log=log, **settings)
        self.nodes.append(node)
        return node.start() if start else node


@contextmanager
def mesh_of(directory: Path, kind: type[Wire]) -> Iterator[Mesh]:
    """A running transport without nodes yet."""
    directory.mkdir(parents=True, exist_ok=True)
    wire = kind(directory)
    wire.start()
    mesh = Mesh(directory, wire)
    try:
        yield mesh
    finally:
        for node in mesh.nodes:
            node.stop()
        wire.stop()


def reserved_port() -> socket.socket:
    """A socket that keeps a loopback port for a process of ours: only a listener may share it.

    The port is below those that the system gives to outgoing connections.
    """
    while True:
        kept = socket.socket()
        try:
            kept.bind(("127.0.0.1", random.randrange(15_000, 32_000)))
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return kept
        except OSError:
            kept.close()
