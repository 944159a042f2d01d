"""The simulated network on real threads, as if an installed package had a transport `sim`.

`SimFabric` is made for the one thread of a simulated world. Here each of its calls, and each of the network's, holds
one lock. Its callbacks queue their argument and return, so no call waits for another one while it holds the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from contract_node import Node
from real_timers import Timers

from zbus import plugins
from zbus.config import BusConfig
from zbus.errors import TransportError
from zbus.ports.fabric import IncomingRequest, OnReply, OnRequest, Receive, RequestHandle
from zbus.sim.machine.fabric import SimFabric, SimNet


class Locked:
    """A request, or the handle of one, whose calls hold the lock."""

    def __init__(self, lock: threading.RLock, inner: Any) -> None:  # type: ignore[valid-type]
        self._lock, self._inner = lock, inner

    @property
    def key(self) -> str:
        return str(self._inner.key)

    @property
    def payload(self) -> bytes:
        return bytes(self._inner.payload)

    def reply(self, data: bytes) -> None:
        with self._lock:
            self._inner.reply(data)

    def close(self) -> None:
        with self._lock:
            self._inner.close()


class LockedFabric(SimFabric):
    """One end of the simulated network."""

    def __init__(self, lock: Any, net: SimNet, node: str, **options: Any) -> None:
        self._lock = lock
        with lock:
            super().__init__(net, node, **options)

    def send(self, frames: Sequence[tuple[str, bytes]]) -> None:
        with self._lock:
            super().send(frames)

    def listen(self, expressions: Sequence[str], receive: Receive) -> None:
        with self._lock:
            super().listen(expressions, receive)

    def ready(self, key: str) -> bool:
        with self._lock:
            return super().ready(key)

    def serve(self, keys: Sequence[str], on_request: OnRequest) -> None:
        def locked(request: IncomingRequest) -> None:
            on_request(Locked(self._lock, request))

        with self._lock:
            super().serve(keys, locked)

    def request(self, key: str, payload: bytes, on_reply: OnReply, timeout_s: float) -> RequestHandle:
        with self._lock:
            return Locked(self._lock, super().request(key, payload, on_reply, timeout_s))

    def close(self) -> None:
        with self._lock:
            super().close()

    def kill(self) -> None:
        """The process of this end disappears."""
        with self._lock:
            self.gone()
            self.closed = True


class SimTransport:
    """The networks behind `sim://…`. URLs with the same name, up to the `?`, reach each other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._timers = Timers(self.lock)
        self._nets: dict[str, SimNet] = {}
        self._nodes = 0
        self.is_down = False

    def net(self, url: str) -> SimNet:
        name = url.partition("?")[0]
        if name not in self._nets:
            self._nets[name] = SimNet(name, self._timers, Random, lambda *step: None)
        return self._nets[name]

    def open_fabric(self, config: BusConfig, url: str, session: Any = None) -> LockedFabric:
        if self.is_down:
            raise TransportError(f"{url} cannot be reached")
        with self.lock:
            self._nodes += 1
            return LockedFabric(self.lock, self.net(url), f"node-{self._nodes}", events_only="events_only" in url)

    def disconnect(self, *, down: bool) -> None:
        """Begin or end an outage of the whole network. Both ends of every connection notice it."""
        with self.lock:
            self.is_down = down
            for net in self._nets.values():
                for fabric in net.fabrics:
                    fabric.disconnected = down

    def end(self) -> None:
        self._timers.end()


@contextmanager
def sim_transport() -> Iterator[SimTransport]:
    """Let `plugins.open_fabric` open `sim://…`."""
    found, load = SimTransport(), plugins._load

    def load_or(group: str, name: str, field: str) -> Any:
        return found.open_fabric if (group, name) == ("zbus.fabrics", "sim") else load(group, name, field)

    plugins._load = load_or
    try:
        yield found
    finally:
        plugins._load = load
        found.end()


class _Process:
    alive = True


class SimFarNode(Node):
    """A node that a test uses as if it were in another process: the simulated network ends with this one."""

    fabric: LockedFabric

    def __init__(self, fabric: LockedFabric, config: dict[str, Any], url: str) -> None:
        super().__init__(fabric)
        self.config, self.url, self.process, self.closed = config, url, _Process(), False

    def close(self) -> float:
        self.closed = True
        return super().close()

    def kill(self) -> None:
        """Disappear without a goodbye, as after kill -9."""
        self.closed, self.process.alive = True, False
        self.fabric.kill()
        super().close()  # ends the threads that play the other process; the fabric has gone already
