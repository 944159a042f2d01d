"""Every transport of the contract suite: how its middle is started and killed, and how bad input gets onto its wire."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import contract_hostile as hostile
import zmq
from contract_node import WAIT_S
from contract_support import Attack, Mesh
from free_ports import free_port
from nats_support import NatsServer
from sim_transport import SimFarNode, sim_transport

from zbus.config import BusConfig


class Command:
    """A command of `zbus` that runs until it is ended, and says on its first line that it is ready."""

    def __init__(self, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ZBUS_", "DYN_"))}
        command = [sys.executable, "-m", "zbus", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        assert json.loads(self._process.stdout.readline()), f"zbus {arguments[0]} did not start"

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self._gone()

    def end(self) -> None:
        """SIGTERM, as a service manager would."""
        self._process.terminate()
        self._gone()

    def _gone(self) -> None:
        try:
            self._process.wait(WAIT_S)
        finally:
            self._process.kill()
            assert self._process.stdout is not None
            self._process.stdout.close()


class ZenohEmbedded(Mesh):
    """No network, so no node at a far end: only what happens inside one bus."""

    name = "zenoh-embedded"
    embedded = True

    def settings(self) -> tuple[dict[str, Any], str]:
        return {}, "zenoh"


class ZenohPeer(Mesh):
    """Each node listens on a tcp port and connects to those before it; nothing stands between them."""

    name = "zenoh-peer"

    def settings(self) -> tuple[dict[str, Any], str]:
        there = [node.config["listen"][0] for node in self.far if not node.closed]
        there += [endpoint for endpoint in self._near_endpoints if endpoint not in there]
        endpoint = f"tcp/127.0.0.1:{free_port()}"
        return {"mode": "peer", "listen": [endpoint], "connect": there}, "zenoh"

    def start(self) -> None:
        self._near_endpoints: list[str] = []

    def opened(self, config: dict[str, Any]) -> None:
        self._near_endpoints.append(config["listen"][0])

    def inject(self, attack: Attack) -> None:
        for endpoint in self._near_endpoints:
            hostile.plain_socket_garbage("127.0.0.1", int(endpoint.rpartition(":")[2]))
        config = {"mode": "peer", "connect": self._near_endpoints}
        hostile.through_zenoh(config, attack.key, attack.answered, attack.reached)

    def clear(self) -> None:
        self._near_endpoints = []
        super().clear()


class ZenohRouter(Mesh):
    """A router process in the middle, and every node a client of it."""

    name = "zenoh-router"
    has_middle = True

    def start(self) -> None:
        self.port = free_port()
        self.restart_middle()

    def stop(self) -> None:
        self._router.end()

    def settings(self) -> tuple[dict[str, Any], str]:
        return {}, f"zenoh://127.0.0.1:{self.port}"

    def kill_middle(self) -> None:
        self._router.kill()

    def restart_middle(self) -> None:
        self._router = Command("router", "--listen", f"tcp/127.0.0.1:{self.port}")

    def inject(self, attack: Attack) -> None:
        hostile.plain_socket_garbage("127.0.0.1", self.port)
        config = {"mode": "client", "connect": [f"tcp/127.0.0.1:{self.port}"]}
        hostile.through_zenoh(config, attack.key, attack.answered, attack.reached)


class Nats(Mesh):
    """A real nats-server in the middle."""

    name = "nats"
    has_middle = True

    def start(self) -> None:
        self.server = NatsServer(self.directory / "nats")
        self.server.start()

    def stop(self) -> None:
        self.server.stop()

    def settings(self) -> tuple[dict[str, Any], str]:
        return {}, self.server.url

    def kill_middle(self) -> None:
        self.server.kill()

    def restart_middle(self) -> None:
        self.server.start()

    def inject(self, attack: Attack) -> None:
        hostile.through_nats(self.server.port, attack.key, attack.answered, attack.send, attack.reached)


class Zmq(Mesh):
    """Sockets from process to process; nodes find each other by a folder."""

    name = "zmq-direct"

    def settings(self) -> tuple[dict[str, Any], str]:
        return {}, f"zmq://?registry={self.directory / 'registry'}"

    def inject(self, attack: Attack) -> None:
        registry = self.directory / "registry"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        drafts = [registry / f"{number}.json" for number in range(len(hostile.BLOBS))]
        try:
            for publish, requests in hostile.leases(registry):
                for endpoint in (publish, requests):
                    hostile.plain_socket_garbage("127.0.0.1", int(endpoint.rpartition(":")[2]))
                hostile.subscriptions_through_zmq(context, publish)
                hostile.requests_through_zmq(context, requests, attack.answered)
            for path, blob in zip(drafts, hostile.BLOBS, strict=True):
                path.write_bytes(blob)
            with context.socket(zmq.XPUB) as publisher:
                publisher.linger = publisher.sndhwm = 0
                publisher.bind("tcp://127.0.0.1:*")
                lease = hostile.forged_lease(registry, publisher.get_string(zmq.LAST_ENDPOINT))
                assert publisher.poll(20_000), "no node connected to the forged node"
                hostile.through_zmq(publisher, hostile.zmq_topic(attack.key), list, attack.reached)
                lease.unlink(missing_ok=True)
        finally:
            for path in drafts:
                path.unlink(missing_ok=True)
            context.term()


class ZmqBroker(Mesh):
    """`zbus broker` in the middle, for events; requests go from process to process."""

    name = "zmq-broker"
    has_middle = True

    def start(self) -> None:
        self.xsub, self.xpub = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.restart_middle()

    def stop(self) -> None:
        self._broker.end()

    def settings(self) -> tuple[dict[str, Any], str]:
        return {}, f"zmq://broker?xsub={self.xsub}&xpub={self.xpub}&registry={self.directory / 'registry'}"

    def kill_middle(self) -> None:
        self._broker.kill()

    def restart_middle(self) -> None:
        self._broker = Command("broker", "--xsub", self.xsub, "--xpub", self.xpub, "--report-interval", "0")

    def inject(self, attack: Attack) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        numbers = itertools.count(1)
        try:
            for endpoint in (self.xsub, self.xpub):
                hostile.plain_socket_garbage("127.0.0.1", int(endpoint.rpartition(":")[2]))
            hostile.subscriptions_through_zmq(context, self.xpub)
            for _, requests in hostile.leases(self.directory / "registry"):
                hostile.requests_through_zmq(context, requests, attack.answered)
            with context.socket(zmq.XPUB) as publisher:
                publisher.linger = publisher.sndhwm = 0
                publisher.connect(self.xsub)
                assert publisher.poll(20_000), "the broker subscribed to nothing"
                stamp = lambda: [b"\x07" * 8 + next(numbers).to_bytes(8)]  # noqa: E731
                hostile.through_zmq(publisher, hostile.zmq_topic(attack.key), stamp, attack.reached)
        finally:
            context.term()


class Sim(Mesh):
    """The network of the simulator. All nodes are in this process, and its middle is an outage of the whole network."""

    name = "sim"
    has_middle = True

    def start(self) -> None:
        self._stack = ExitStack()
        self._transport = self._stack.enter_context(sim_transport())

    def stop(self) -> None:
        self._stack.close()

    def settings(self) -> tuple[dict[str, Any], str]:
        return {}, "sim://contract"

    def spawn(self, config: dict[str, Any] | None = None, url: str = "") -> Any:
        config, url = self.settings() if config is None else (config, url)
        node: Any = SimFarNode(self._transport.open_fabric(BusConfig(**config), url), config, url)
        self.far.append(node)
        return node

    def kill_middle(self) -> None:
        self._transport.disconnect(down=True)

    def restart_middle(self) -> None:
        self._transport.disconnect(down=False)

    def inject(self, attack: Attack) -> None:
        """A stranger on the same network sends and requests nonsense."""
        stranger = self._transport.open_fabric(BusConfig(), "sim://contract")
        try:
            for blob in hostile.BLOBS:
                stranger.send([(attack.key, blob), (f"{attack.key.rpartition('/')[0]}/*", blob), ("**", blob)])
                stranger.request(attack.answered, blob, lambda data: None, 1.0)
                stranger.request(f"{attack.answered.rpartition('/')[0]}/*", blob, lambda data: None, 1.0)
            hostile.sent_until(lambda: stranger.send([(attack.key, hostile.INJECTED)]), attack.reached)
        finally:
            stranger.close()

    def _drop(self, far: Any) -> list[str]:
        self.far.remove(far)
        if not far.closed:
            far.close()
        return []


MESHES: list[type[Mesh]] = [ZenohEmbedded, ZenohPeer, ZenohRouter, Nats, Zmq, ZmqBroker, Sim]
