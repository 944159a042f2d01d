"""A bridge forwards events between two transports, and keeps their publisher, time and order.

A bridge is a node with two links. It stores the events that arrive on one link in its log, if it has one, and forwards
them over the other link from there. Either side may therefore be down, and the bridge itself may be killed: it resumes
where it stopped. Each event names the nodes that forwarded it, and a node that finds itself among them drops the event,
so that no loop arises. A bridge publishes no events of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

from zbus import plugins
from zbus.errors import TransportError
from zbus.event import Provenance
from zbus.introspection import snapshot
from zbus.keys import KeySet
from zbus.mesh.link import Link
from zbus.mesh.send_queue import SendQueue
from zbus.node import Node, Ports
from zbus.observe.records import record, record_reason
from zbus.ports.log import Log, Span
from zbus.util.backoff import Backoff
from zbus.util.runtime import REAL, Runtime
from zbus.wire.provenance import Forward

from .config import BridgeConfig

BRIDGE_STARTED = "BRIDGE_STARTED"
BRIDGE_DISCONNECTED = "BRIDGE_DISCONNECTED"
BRIDGE_CONNECTED = "BRIDGE_CONNECTED"
RETRY_S = (0.5, 10.0)
PLAIN_PROMISE = (
    "; a plain side counts as down while its NATS server is down, or while its ZMQ socket has no subscriber. It"
    " acknowledges nothing, so a loss to one of several subscribers, or when a connection breaks, is not noticed"
)


class Bridge:
    """A bridge between two transports. Use it with `async with`.

        async with zbus.Bridge(("nats://127.0.0.1:4222", "zenoh://127.0.0.1:7447"), ["shop/**"], log="bridge.db"):
            await asyncio.Event().wait()

    `keys`: the key expressions to forward. `direction`: "both", "forward" (from the first to the second) or "reverse".
    `raw`: nats and zmq carry plain messages, without the zbus envelope. `log`: with a log, no event is lost while a
    side is down, even at the start. Without a log, events are dropped and counted then, and both sides must be up at
    the start. `mode`, `listen` and `connect` apply to the side that is zenoh. `retain_age_s`, `retain_bytes` and
    `retain_events` limit the log, and so how long a side may be down. A plain message gets its identity where it
    enters, so two parallel raw bridges deliver it twice: use one bridge, or a stream (`nats+js://`).
    """

    def __init__(
        self,
        between: tuple[str, str],
        keys: Sequence[str],
        *,
        direction: Literal["both", "forward", "reverse"] = "both",
        raw: bool = False,
        log: str | os.PathLike[str] | None = None,
        name: str = "",
        **more: Any,
    ) -> None:
        path = os.fspath(log) if log is not None else None
        given: dict[str, Any] = {"direction": direction, "raw": raw, "log": path, "name": name, **more}
        self._set_up(BridgeConfig(between=between, keys=keys, **given), REAL, plugins)

    @classmethod
    def of(cls, config: BridgeConfig, runtime: Runtime = REAL, ports: Ports = plugins) -> Bridge:
        """Return the bridge for a validated configuration."""
        bridge = cls.__new__(cls)
        bridge._set_up(config, runtime, ports)
        return bridge

    def _set_up(self, config: BridgeConfig, runtime: Runtime, ports: Ports) -> None:
        self.config, self.name, self._time_ns = config, config.title, runtime.time_ns
        self._node = Node(
            config.bus_config(), runtime=runtime, ports=ports, forward=self._forward, open_link=self._open_link
        )
        self._sides = _Sides(self._node, dict(zip(config.urls, config.labels, strict=True)))
        self._keys = KeySet(config.keys)

    async def __aenter__(self) -> Bridge:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def durable(self) -> bool:
        """Whether a log keeps the events that a side has not received."""
        return self.config.log is not None

    async def start(self) -> None:
        """Open both sides. Events are forwarded once it returns. If it fails or is cancelled, everything is closed."""
        try:
            await self._node.start()
            network = self._node.network
            assert network is not None
            if not self.durable:  # only now: earlier events could not have been forwarded to the second side
                await network.add_interest(self._keys.expressions, self._node.runtime.steady_ns(), store=False)
        except BaseException:
            await self.aclose()
            raise
        level = logging.INFO if self.durable else logging.WARNING
        with self._node.runtime.running():
            record(BRIDGE_STARTED, level, bridge=self.name, durable=self.durable, promise=self.promise)

    @property
    def promise(self) -> str:
        """A sentence about what happens to events while a side is down."""
        if self.durable:
            kept = "events are kept in the log while a side is down, and sent when it is back"
            plain = [url for url in self.config.urls if url.partition("://")[0].endswith("+raw")]
            return kept + (PLAIN_PROMISE if plain else "")
        return "there is no log: a side that is down loses events, and both sides do while the bridge is down"

    async def aclose(self) -> None:
        """Send the remaining events, and close both sides within bounded time. A second call has no effect."""
        await self._sides.give_up()
        await self._node.aclose()

    async def _open_link(self, url: str) -> None:
        await self._sides.open(url)

    def stats(self) -> dict[str, Any]:
        """Return the statistics of this run for each direction.

        `forwarded` counts each forwarded event once. `pending_events` are the events that are not forwarded yet; events
        left by an earlier run count for both directions. `lag_ms` is the age of the oldest waiting event or, if none
        waits, the age of the last event when it was sent.
        """
        counts = self._node.stats.counts()
        first, second = self.config.labels
        ways = {"forward": (first, second), "reverse": (second, first)}
        if self.config.direction != "both":
            ways = {self.config.direction: ways[self.config.direction]}
        return {
            "bridge": self.name,
            "durable": self.durable,
            **{way: self._way(*ends) for way, ends in ways.items()},
            "loops_prevented": counts.pop("loops_prevented", 0),
            "duplicates": counts.pop("duplicates_received", 0),
            "counts": counts,
        }

    def node_stats(self) -> dict[str, Any]:
        """Return what `bus.stats()` contains, for the node that the bridge runs."""
        return snapshot(self._node)

    def diagnostics(self) -> dict[str, Any]:
        """Return the configuration and the state of the node, without secrets."""
        return {"bridge": self.name, "keys": list(self.config.keys), **self._node.diagnostics()}

    def _way(self, source: str, target: str) -> dict[str, Any]:
        link = self._link(target)
        send_queue: SendQueue | None = link.send_queue if link is not None else None
        network = self._node.network
        waiting, oldest_ns = network.transit[source].after(network.sent(target)) if network is not None else (0, None)
        lag_ns = send_queue.forwarded_lag_ns if send_queue is not None else 0
        if oldest_ns is not None:
            lag_ns = max(0, self._time_ns() - oldest_ns)
        return {
            "from": source,
            "to": target,
            "connected": send_queue is not None,
            "forwarded": send_queue.forwarded if send_queue is not None else 0,
            "lag_ms": round(lag_ns / 1e6, 3),
            "pending_events": waiting,
        }

    def _link(self, label: str) -> Link | None:
        links = self._node.network.links if self._node.network is not None else []
        return next((each for each in links if each.label == label), None)

    def _forward(self, link: str) -> Forward:
        """Return what to forward over a link. Called on the threads of send queues and of the log service."""
        keys = self._keys
        first, second = self.config.labels
        silent = {"both": None, "forward": first, "reverse": second}[self.config.direction]

        def forward(key: str, came: Provenance) -> tuple[int, ...] | None:
            if came.link == link or link == silent or key not in keys:
                return None
            return (*came.via, came.origin) if came.origin else came.via

        return forward


class _Sides:
    """The two transports of a bridge. With a log, a side may be opened later."""

    def __init__(self, node: Node, names: dict[str, str]) -> None:
        self._node, self._names = node, names
        self._uniform, self._time_ns = node.runtime.uniform, node.runtime.time_ns
        self._trying: dict[asyncio.Task[None], None] = {}
        self._left_noted = False

    async def open(self, url: str) -> None:
        """Open one side. With a log, keep trying in the background if that fails."""
        log = self._node.log
        try:
            if log is not None and not self._left_noted:
                await self._note_left(log)
            await self._node.link(url)
        except TransportError as error:
            if log is None:
                raise
            self._report(url, error)
            self._trying[asyncio.get_running_loop().create_task(self._keep_trying(url))] = None

    async def give_up(self) -> None:
        """Stop trying to open a side."""
        trying, self._trying = self._trying, {}
        for task in trying:
            task.cancel()
        if trying:
            await asyncio.wait(trying)

    async def _note_left(self, log: Log) -> None:
        """Count the events that an earlier run left unsent, before new ones arrive."""
        network = self._node.network
        assert network is not None
        self._left_noted, head = True, self._node.dispatcher.delivered
        first, second = self._names.values()
        for source, target in ((first, second), (second, first)):
            sent = network.sent(target)
            if sent < head:
                oldest_ns = await self._node.run(_oldest_ns, log, sent, self._time_ns())
                network.transit[source].entered(head, log.count(sent, head), oldest_ns)

    async def _keep_trying(self, url: str) -> None:
        pauses = Backoff(*RETRY_S, uniform=self._uniform)
        pause = pauses.next()
        while True:
            await asyncio.sleep(pause)
            try:
                await self._node.link(url)
                record(BRIDGE_CONNECTED, transport=self._names[url])
                return
            except TransportError as error:
                pause = pauses.next()
                self._report(url, error, again_in_s=round(pause, 3))

    def _report(self, url: str, error: TransportError, **fields: float) -> None:
        name, reason = self._names[url], str(error)
        record_reason(BRIDGE_DISCONNECTED, logging.WARNING, code="link_failed", reason=reason, transport=name, **fields)


def _oldest_ns(log: Log, after: int, now_ns: int) -> int:
    """Return when the first event after an offset was published, or `now_ns` if the log no longer has it."""
    events, _, _ = log.read(KeySet.all(), Span(max(after, log.low_water())), 1).events(skip_corrupt=True)
    return events[0].published_at if events else now_ns
