"""Unsupported features of a transport: rejected with an error that names them, before anything is sent."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from inside import node_of
from nats_support import NatsServer, nats_server
from sim_transport import SimTransport, sim_transport

import zbus
from zbus.config import BusConfig
from zbus.errors import NoResponders, TransportUnsupported
from zbus.event import Event
from zbus.plugins import open_fabric
from zbus.ports.fabric import Fabric
from zbus.wire.envelope import encode, unpack

WAIT_S = 20.0


def _nats_raw(server: NatsServer, _: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(f"nats+raw://127.0.0.1:{server.port}", {})] * 2


def _zmq_raw(_: NatsServer, __: Path) -> list[tuple[str, dict[str, Any]]]:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    return [(f"zmq+raw://?bind={endpoint}", {}), (f"zmq+raw://?connect={endpoint}", {})]


def _nats_dynamo(server: NatsServer, _: Path) -> list[tuple[str, dict[str, Any]]]:
    url = f"nats://127.0.0.1:{server.port}"
    return [(url, {"wire": "dynamo", "transport": url})] * 2


def _zmq_dynamo(_: NatsServer, store: Path) -> list[tuple[str, dict[str, Any]]]:
    url = f"zmq://?store={store}"
    return [(url, {"wire": "dynamo", "transport": url})] * 2


def _sim(_: NatsServer, __: Path) -> list[tuple[str, dict[str, Any]]]:
    return [("sim://events?events_only", {})] * 2


EVENTS_ONLY = {
    "nats-raw": _nats_raw,
    "zmq-raw": _zmq_raw,
    "nats-dynamo": _nats_dynamo,
    "zmq-dynamo": _zmq_dynamo,
    "sim": _sim,
}


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Iterator[SimTransport]:
    with sim_transport() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as found:
        yield found


@pytest.fixture(params=EVENTS_ONLY)
def fabrics(request: pytest.FixtureRequest, server: NatsServer, tmp_path: Path) -> Iterator[list[Fabric]]:
    """One that sends and one that listens."""
    found = [open_fabric(BusConfig(**config), url) for url, config in EVENTS_ONLY[request.param](server, tmp_path)]
    yield found
    for fabric in found:
        fabric.close()


def test_a_fabric_for_events_only_refuses_requests_by_name(fabrics: list[Fabric]) -> None:
    fabric = fabrics[0]
    assert fabric.events_only
    refused: list[Callable[[], object]] = [
        lambda: fabric.request("ask/x", b"", lambda data: None, 1.0),
        lambda: fabric.serve(["ask/x"], lambda request: None),
    ]
    for doing in refused:
        with pytest.raises(TransportUnsupported) as caught:
            doing()
        assert fabric.name.partition("+")[0] in caught.value.transport
        assert caught.value.capability
        assert caught.value.capability in str(caught.value)


def test_events_flow_after_a_refusal(fabrics: list[Fabric]) -> None:
    sender, listener = fabrics
    received: list[bytes] = []
    arrived = threading.Event()

    def receive(frame: bytes, acknowledge: Callable[[], None] | None) -> None:
        received.append(frame)
        arrived.set()

    with pytest.raises(TransportUnsupported):
        listener.serve(["ask/x"], lambda request: None)
    listener.listen(["namespace/component/topic"], receive)
    with pytest.raises(TransportUnsupported):
        sender.request("ask/x", b"", lambda data: None, 1.0)

    deadline, sequence = time.monotonic() + WAIT_S, 0
    while not arrived.wait(0.05):
        assert time.monotonic() < deadline
        event = Event(7, sequence, 5_000_000, "namespace/component/topic", b"x")
        sender.send([(event.key, encode(event))])
        sequence += 1
    events = unpack(received[0])
    assert [(event.key, event.payload) for event in events] == [("namespace/component/topic", b"x")]


@pytest.fixture(params=EVENTS_ONLY)
def place(request: pytest.FixtureRequest, server: NatsServer, tmp_path: Path) -> dict[str, Any]:
    """The settings of a bus on it."""
    url, config = EVENTS_ONLY[request.param](server, tmp_path)[0]
    return {"transport": url} | config


async def quote(request: zbus.Event) -> bytes:
    return b"12"


async def test_serving_is_refused_by_name_where_no_transport_carries_requests(place: dict[str, Any]) -> None:
    async with zbus.open(**place) as bus:
        with pytest.raises(TransportUnsupported) as caught:
            bus.serve("prices/quote")(quote)
        assert "serving requests" in caught.value.capability
        assert node_of(bus).is_open


async def test_a_bus_that_is_to_serve_does_not_open_where_no_transport_carries_requests(place: dict[str, Any]) -> None:
    bus = zbus.open(**place)
    bus.serve("prices/quote")(quote)
    with pytest.raises(TransportUnsupported):
        await bus.start()
    assert not node_of(bus).is_open  # and no thread of it is left, which every test checks


async def price(bus: zbus.Bus) -> bytes:
    """The answer of the one who serves; it may take a moment until the server knows of it."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return (await bus.request("prices/quote", timeout=10)).payload
            except NoResponders:
                await asyncio.sleep(0.01)


beside_others = pytest.mark.parametrize(
    "place", ["nats-raw", "zmq-raw", "sim"], indirect=True
)  # a wire is for all of a bus


@beside_others
async def test_a_bus_that_serves_does_not_move_to_a_transport_that_carries_no_requests(
    server: NatsServer, place: dict[str, Any]
) -> None:
    async with zbus.open(transport=server.url) as bus, zbus.open(transport=server.url) as other:
        bus.serve("prices/quote")(quote)
        with pytest.raises(TransportUnsupported):
            await bus.switch_transport(place["transport"], overlap_s=0.1)
        assert [link["transport"] for link in bus.diagnostics()["links"]] == [server.url]
        assert await price(other) == b"12"


@beside_others
async def test_beside_a_transport_that_carries_requests_serving_is_not_refused(
    server: NatsServer, place: dict[str, Any]
) -> None:
    async with zbus.open(transports=[server.url, place["transport"]]) as bus, zbus.open(transport=server.url) as other:
        bus.serve("prices/quote")(quote)
        assert await price(other) == b"12"
