"""The registry: who is there, what they do, when they were last seen; joining, leaving, and coming back."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inside import node_of
from mesh_fakes import Counts, FakeRuntime, recorded
from nats_support import nats_server

import zbus
from zbus.errors import EventInvalid
from zbus.mesh import node_registry
from zbus.mesh.node_registry import NodeRegistry
from zbus.observe.catalog import CODES
from zbus.ports.lineage import NO_BRANCH, Branch
from zbus.wire.announcement import (
    CAPABILITIES,
    PROTOCOL,
    PROTOCOL_MIN,
    Announcement,
    decode_announcement,
    encode_announcement,
)
from zbus.wire.envelope import NODE

TTL_S = 1.5


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """The records of nodes so far: what, and of which name."""
    caplog.set_level(logging.INFO, "zbus")
    return lambda: [
        (each.zbus["record"], each.zbus["node_name"])  # type: ignore[attr-defined]
        for each in caplog.records
        if each.name == "zbus" and each.zbus["record"].startswith("NODE_")  # type: ignore[attr-defined]
    ]


@pytest.fixture(params=["zenoh", "nats", "zmq"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The settings of two nodes that reach each other."""
    if request.param == "zenoh":
        endpoint = f"unixsock-stream/{tmp_path}/n.sock"
        yield {"mode": "peer", "listen": [endpoint]}, {"mode": "peer", "connect": [endpoint]}
    elif request.param == "nats":
        with nats_server(tmp_path / "nats") as server:
            yield {"transport": server.url}, {"transport": server.url}
    else:
        url = f"zmq://?registry={tmp_path}/registry"
        yield {"transport": url}, {"transport": url}


async def until(condition: Callable[[], object], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


def others(bus: zbus.Bus) -> dict[str, zbus.NodeInfo]:
    return {node.name: node for node in bus.nodes() if not node.is_self}


async def test_nodes_know_of_each_other_on_every_transport(
    pair: tuple[dict[str, Any], dict[str, Any]], log_path: Path, reported: Any
) -> None:
    first, second = pair
    about = {"node": "second", "bus": "control", "metadata": {"purpose": "billing"}}
    async with zbus.open(**first, node="first", node_ttl_s=TTL_S) as there:
        async with zbus.open(log_path, **second, **about, node_ttl_s=TTL_S) as here:
            await here.publisher("shop/orders/created")

            @here.serve("prices/quote")
            async def quote(request: zbus.Event) -> bytes:
                return b""

            async with here.subscribe("audit/**"):
                await until(lambda: "audit/**" in (others(there).get("second") or there.nodes()[0]).subscribes)
                node = others(there)["second"]
                await until(lambda: "first" in others(here))

            assert (node.buses, node.metadata, node.has_log) == (("control",), {"purpose": "billing"}, True)
            assert (node.publishes, node.serves) == (("shop/orders/created",), ("prices/quote",))
            assert node.topics == ("shop/orders/created", "audit/**")
            assert (node.pid, node.alive, node.trust, node.version) == (os.getpid(), True, "none", zbus.__version__)
            assert not any(name.startswith("@zbus") for name in (*node.subscribes, *node.serves))
            assert there.nodes()[0].is_self
            assert there.nodes()[0].name == "first"
            assert there.stats()["nodes"] == 2
        await until(lambda: not others(there)["second"].alive)
    assert reported().count(("NODE_JOINED", "second")) == 1
    assert reported()[-1] == ("NODE_LEFT", "second")


async def test_a_node_that_starts_again_has_rejoined(tmp_path: Path, log_path: Path, reported: Any) -> None:
    endpoint = f"unixsock-stream/{tmp_path}/n.sock"
    async with zbus.open(mode="peer", listen=[endpoint], node="there") as there:
        for _ in range(2):
            async with zbus.open(log_path, mode="peer", connect=[endpoint], node="here"):
                await until(lambda: others(there).get("here") and others(there)["here"].alive)
            await until(lambda: not others(there)["here"].alive)

        assert len(there.nodes()) == 2
    of_here = [name for name, node in reported() if node == "here"]
    assert of_here == ["NODE_JOINED", "NODE_LEFT", "NODE_REJOINED", "NODE_LEFT"]


CHILD = """
    import asyncio, sys, zbus
    async def main():
        async with zbus.open(sys.argv[1], mode="peer", connect=[sys.argv[2]], node="child", node_ttl_s=1.5):
            await asyncio.sleep(60)
    asyncio.run(main())
"""


async def test_a_frozen_node_is_gone_after_its_time_to_live_and_rejoins_when_it_goes_on(
    tmp_path: Path, log_path: Path, reported: Any
) -> None:
    endpoint = f"unixsock-stream/{tmp_path}/n.sock"
    async with zbus.open(mode="peer", listen=[endpoint], node_ttl_s=TTL_S) as there:
        arguments = [sys.executable, "-c", textwrap.dedent(CHILD), str(log_path), endpoint]
        child = subprocess.Popen(arguments)
        try:
            await until(lambda: others(there).get("child") and others(there)["child"].alive)
            child.send_signal(signal.SIGSTOP)
            await until(lambda: not others(there)["child"].alive)
            child.send_signal(signal.SIGCONT)
            await until(lambda: others(there)["child"].alive)
            child.kill()
            await until(lambda: not others(there)["child"].alive)
        finally:
            child.kill()
            child.wait()
    assert [name for name, _ in reported()] == ["NODE_JOINED", "NODE_LEFT", "NODE_REJOINED", "NODE_LEFT"]


async def test_a_goodbye_of_an_earlier_run_does_not_end_the_next(tmp_path: Path) -> None:
    endpoint = f"unixsock-stream/{tmp_path}/n.sock"
    async with zbus.open(mode="peer", listen=[endpoint]) as there:
        registry = node_of(there).network.registry  # type: ignore[union-attr]
        registry.receive(encode_announcement(reported_by(7, "first", False)), "zenoh", "none")
        registry.receive(encode_announcement(reported_by(7, "second", False)), "zenoh", "none")
        registry.receive(encode_announcement(reported_by(7, "first", True)), "zenoh", "none")

        assert [node.alive for node in there.nodes()] == [True, True]


async def test_alone_a_bus_knows_itself(log_path: Path) -> None:
    async with zbus.open(log_path, node="me") as bus:
        (node,) = bus.nodes()
        assert (node.name, node.is_self, node.alive) == ("me", True, True)


def reported_by(origin: int, run: str, leaving: bool) -> Announcement:
    return Announcement(
        origin=origin,
        run=run,
        leaving=leaving,
        ttl_s=15.0,
        name="x",
        bus="main",
        host="h",
        pid=1,
        started_at=1,
        version="0",
        has_log=False,
        endpoints=(),
        publishes=("a/b",),
        subscribes=(),
        serves=(),
        more=0,
        metadata={},
    )


@given(st.binary(max_size=200))
def test_no_bytes_at_all_crash_the_reader_of_announcements(data: bytes) -> None:
    try:
        decode_announcement(b"\x05" + data)
    except EventInvalid:
        pass


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_announcement_is_refused_or_read_whole(at: int, byte: int) -> None:
    frame = bytearray(encode_announcement(reported_by(7, "run", False)))
    frame[1 + at % (len(frame) - 1)] = byte
    try:
        found = decode_announcement(bytes(frame))
    except EventInvalid:
        return
    assert found.ttl_s > 0
    assert found.origin >= 0


async def test_rubbish_in_place_of_an_announcement_is_counted_and_stops_nothing(tmp_path: Path) -> None:
    endpoint = f"unixsock-stream/{tmp_path}/n.sock"
    async with zbus.open(mode="peer", listen=[endpoint]) as there, zbus.open(mode="peer", connect=[endpoint]) as here:
        await until(lambda: len(there.nodes()) == 2)
        here.zenoh.put("@zbus/node/7", b"\x05rubbish")
        await until(lambda: there.stats().get("invalid_received") == 1)
        assert len(there.nodes()) == 2


async def test_the_command_lists_nodes_as_a_table_and_as_json(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        async with zbus.open(transport=server.url, node="worker-7") as bus, bus.subscribe("jobs/*"):
            for flags in ([], ["--json"]):
                command = [sys.executable, "-m", "zbus", "nodes", "--transport", server.url, *flags]
                process = await asyncio.create_subprocess_exec(
                    *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
                )
                stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
                assert process.returncode == 0, stderr.decode()
                if flags:
                    (found,) = [json.loads(line) for line in stdout.splitlines()]
                    assert (found["name"], found["subscribes"]) == ("worker-7", ["jobs/*"])
                else:
                    assert "worker-7" in stdout.decode()
                    assert "jobs/*" in stdout.decode()


async def test_nodes_needs_a_network() -> None:
    command = [sys.executable, "-m", "zbus", "nodes"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert "--transport" in stderr.decode()


async def test_the_table_of_nodes_is_bounded_and_a_node_that_is_evicted_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zbus.mesh.node_registry.NODES_MAX", 2)
    async with zbus.open() as bus:
        network = node_of(bus).network
        assert network is not None
        (own, *_) = bus.nodes()
        for origin in (2, 4, 6):
            announced = msgspec.structs.replace(
                network.registry._announcement(), origin=origin, run=f"run-{origin}", name=f"node-{origin}"
            )
            network.registry.receive(encode_announcement(announced), "nats", "none")

        assert [node.name for node in bus.nodes()] == [own.name, "node-4", "node-6"]
        assert bus.stats()["nodes_evicted"] == 1


async def test_a_node_counts_the_names_that_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbus.mesh.node_registry.NAMES_MAX", 2)
    async with zbus.open() as bus:
        for key in ("a", "b", "c", "d", "e"):
            await bus.publisher(key)

        (node,) = bus.nodes()

        assert (node.publishes, node.truncated) == (("a", "b"), 3)


@pytest.fixture
async def clock() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
async def registry(clock: FakeRuntime) -> AsyncIterator[NodeRegistry]:
    """A registry without a network, whose clock stands still."""
    network: Any = SimpleNamespace(
        origin=1, branch=NO_BRANCH, subscribed=(), served=(), endpoints=list, announce_frames=lambda frames: None
    )
    registry = NodeRegistry(zbus.BusConfig(), network, (), False, Counts().add, clock)
    yield registry
    registry.task.cancel()
    await asyncio.wait([registry.task])


def announce(registry: NodeRegistry, origin: int, run: str = "first", leaving: bool = False) -> None:
    registry.receive(encode_announcement(reported_by(origin, run, leaving)), "link", "none")


def known_to(registry: NodeRegistry) -> list[tuple[int, bool]]:
    """The origins of the other nodes, and whether they are alive."""
    return sorted((int(node.id, 16), node.alive) for node in registry.nodes() if not node.is_self)


async def test_a_full_table_evicts_the_node_that_is_gone_for_longest_and_then_the_one_not_seen_for_longest(
    registry: NodeRegistry, clock: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus.mesh.node_registry.NODES_MAX", 5)
    counts = Counts()
    registry._count = counts.add
    for origin in (2, 4, 6, 8, 10):
        announce(registry, origin)
        clock.now += 1
    announce(registry, 8, leaving=True)
    clock.now += 1
    announce(registry, 6, leaving=True)
    announce(registry, 2)  # it is the most recently seen one again
    clock.now += 1
    registry.seen(4)  # and now this one
    assert known_to(registry) == [(2, True), (4, True), (6, False), (8, False), (10, True)]
    assert counts == {}

    evicted = []
    for origin in (12, 14, 16, 18):
        before = {each for each, _ in known_to(registry)}
        clock.now += 1
        announce(registry, origin)
        evicted += before - {each for each, _ in known_to(registry)}

    assert evicted == [8, 6, 10, 2]
    assert counts == {"nodes_evicted": 4}


async def test_a_node_that_is_gone_and_returns_is_evicted_like_a_present_one(
    registry: NodeRegistry, clock: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbus.mesh.node_registry.NODES_MAX", 2)
    announce(registry, 2)
    announce(registry, 2, leaving=True)
    announce(registry, 4)
    clock.now += 1
    announce(registry, 2)
    announce(registry, 6)

    assert known_to(registry) == [(2, True), (6, True)]


async def test_a_new_node_in_a_full_table_costs_the_same_as_in_a_small_one(
    registry: NodeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile node can announce as many ids as it likes. The table is not searched for each of them."""
    visits = 0

    class CountedNode(node_registry._KnownNode):
        def __getattribute__(self, name: str) -> Any:
            nonlocal visits
            visits += 1
            return super().__getattribute__(name)

    monkeypatch.setattr("zbus.mesh.node_registry.NODES_MAX", 500)
    monkeypatch.setattr(node_registry, "_KnownNode", CountedNode)
    for origin in range(500):
        announce(registry, 2 + 2 * origin)
    visits = 0
    announce(registry, 2000)

    assert 0 < visits < 20


async def test_a_node_that_was_gone_for_an_hour_is_forgotten(registry: NodeRegistry, clock: FakeRuntime) -> None:
    announce(registry, 2)
    clock.now += 15
    registry._expire()
    assert known_to(registry) == [(2, True)]
    clock.now += 1
    registry._expire()
    assert known_to(registry) == [(2, False)]
    registry.seen(2)  # a late beacon does not revive it
    clock.now += node_registry.GONE_KEPT_S - 16
    registry._expire()
    assert known_to(registry) == [(2, False)]
    clock.now += 1
    registry._expire()
    assert known_to(registry) == []


async def test_why_a_node_left_or_rejoined_is_recorded_with_a_code(registry: NodeRegistry, clock: FakeRuntime) -> None:
    with recorded(logging.INFO) as records:
        announce(registry, 7)
        clock.now += 16.0  # over its time to live
        registry._expire()
        announce(registry, 7)
        announce(registry, 7, leaving=True)
        announce(registry, 7, leaving=True)
        announce(registry, 7, "second")

    assert [(each["record"], each.get("code")) for each in records] == [
        ("NODE_JOINED", None),
        ("NODE_LEFT", "node_silent"),
        ("NODE_REJOINED", "node_seen_again"),
        ("NODE_LEFT", "node_closed"),
        ("NODE_REJOINED", "node_restarted"),
    ]
    assert (records[1]["silent_s"], records[1]["reason"]) == (16.0, CODES["node_silent"])


async def test_a_node_whose_protocol_is_too_new_or_too_old_is_refused_by_name(
    registry: NodeRegistry, clock: FakeRuntime
) -> None:
    counts = Counts()
    registry._count = counts.add
    announced = reported_by(6, "first", False)
    strange = {"capabilities": ("telepathy",), "protocol": PROTOCOL + 5}
    understood = msgspec.structs.replace(announced, protocol_min=PROTOCOL, **strange)
    too_new = msgspec.structs.replace(announced, origin=8, name="future", protocol_min=PROTOCOL + 1, **strange)
    too_old = msgspec.structs.replace(announced, origin=10, name="past", protocol=PROTOCOL_MIN - 1)
    with recorded(logging.ERROR) as records:
        for each in (understood, too_new, too_new, too_old):
            registry.receive(encode_announcement(each), "link", "none")

    assert [(node.id, node.protocol, node.capabilities) for node in registry.nodes() if not node.is_self] == [
        ("6", PROTOCOL + 5, ("telepathy",))
    ]
    assert [(each["record"], each["code"], each["node_name"]) for each in records] == [
        ("NODE_REFUSED", "protocol_unsupported", "future"),
        ("NODE_REFUSED", "protocol_unsupported", "past"),
    ]
    assert counts == {"nodes_refused": 3}


async def test_a_node_of_the_first_version_speaks_protocol_1(registry: NodeRegistry) -> None:
    fields = msgspec.structs.astuple(reported_by(6, "first", False))[:17]
    registry.receive(bytes([NODE]) + msgspec.msgpack.encode(fields), "link", "none")
    own, other = registry.nodes()

    assert (other.protocol, other.capabilities, other.incarnation) == (1, (), "0")
    assert (own.protocol, own.capabilities) == (PROTOCOL, CAPABILITIES)


# Copies of one log.


def of_process(registry: NodeRegistry, run: str, incarnation: int, parent: int = 7, leaving: bool = False) -> None:
    """Receive an announcement of a process that uses log 5."""
    announcement = msgspec.structs.replace(reported_by(5, run, leaving), branch=Branch(incarnation, 10, parent))
    registry.receive(encode_announcement(announcement), "link", "none")


def incarnations_of(registry: NodeRegistry) -> list[tuple[str, bool]]:
    return [(node.incarnation, node.alive) for node in registry.nodes() if node.id == "5"]


@pytest.mark.parametrize("run", ["another", "first"], ids=["copied", "resumed"])
async def test_two_processes_with_copies_of_one_log_are_both_shown_and_do_not_rejoin_in_turns(
    registry: NodeRegistry, clock: FakeRuntime, run: str
) -> None:
    with recorded(logging.INFO) as records:
        for _ in range(10):
            of_process(registry, "first", 8)
            of_process(registry, run, 9)
            clock.now += 5
            registry.seen(5, 8)
            registry._expire()

    assert incarnations_of(registry) == [("8", True), ("9", True)]
    first, *others = [each["record"] for each in records]
    assert first == "NODE_JOINED"
    assert others == (["NODE_REJOINED"] if run == "another" else []) + ["NODE_JOINED"]  # it looks like a restart


async def test_a_late_announcement_of_an_earlier_process_is_no_copy(registry: NodeRegistry, clock: FakeRuntime) -> None:
    of_process(registry, "first", 8)
    of_process(registry, "second", 9, parent=8)
    clock.now += 1
    of_process(registry, "first", 8)
    of_process(registry, "first", 8, leaving=True)
    clock.now += 5
    of_process(registry, "first", 8, leaving=True)

    assert incarnations_of(registry) == [("9", True)]


async def test_a_copy_restarts_leaves_or_is_silent_like_any_node(registry: NodeRegistry, clock: FakeRuntime) -> None:
    def both() -> None:
        of_process(registry, "first", 8)
        of_process(registry, "second", 9)
        clock.now += 5
        of_process(registry, "first", 8)

    with recorded(logging.INFO) as records:
        both()
        of_process(registry, "third", 10, parent=8)
        assert incarnations_of(registry) == [("9", True), ("a", True)]
        of_process(registry, "third", 10, parent=8, leaving=True)
        assert incarnations_of(registry) == [("9", True)]
        both()
        clock.now += 10
        registry.seen(5, 9)
        clock.now += 6
        registry._expire()

    assert incarnations_of(registry) == [("9", True)]
    assert [(each["record"], each.get("code")) for each in records] == [
        ("NODE_JOINED", None),
        ("NODE_REJOINED", "node_restarted"),
        ("NODE_JOINED", None),
        ("NODE_REJOINED", "node_restarted"),
        ("NODE_LEFT", "node_closed"),
        ("NODE_JOINED", None),
        ("NODE_LEFT", "node_silent"),
    ]


async def test_the_number_of_copies_is_bounded(
    registry: NodeRegistry, clock: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_registry, "COPIES_MAX", 2)
    for _ in range(2):
        for number in range(5):
            of_process(registry, f"run {number}", 20 + number)
        clock.now += 5

    assert len(incarnations_of(registry)) == 3
