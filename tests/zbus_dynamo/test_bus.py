"""A whole bus on the Dynamo wire: the publishers and subscribers of zbus beside those of Dynamo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from dynamo_peer import NatsPeer, Records, ZmqPublisher, ZmqSubscriber, closing_all, envelope, subject, zmq_context
from nats_support import nats_server

import zbus
from zbus import EventPublisher, EventSubscriber
from zbus.errors import TransportUnsupported

Scoped = Callable[[zbus.Bus], zbus.Scope]
SCOPES: dict[str, Scoped] = {
    "namespace": lambda bus: bus.namespace("ns"),
    "component": lambda bus: bus.component("ns", "worker"),
    "endpoint": lambda bus: bus.component("ns", "worker").endpoint("generate"),
}
NAMES = {"namespace": ("ns",), "component": ("ns", "worker"), "endpoint": ("ns", "worker", "generate")}
WAIT_S = 20.0


@pytest.fixture
def on_nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsPeer]:
    """The environment of a Dynamo process whose event plane is NATS, and a peer in it."""
    with nats_server(tmp_path / "nats") as server:
        monkeypatch.setenv("DYN_EVENT_PLANE", "nats")
        monkeypatch.setenv("NATS_SERVER", server.url)
        monkeypatch.setenv("ZBUS_WIRE", "dynamo")
        peer = NatsPeer(server.url)
        yield peer
        peer.close()


@pytest.fixture
def on_zmq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    """The environment of a Dynamo process whose event plane is ZMQ, and its store."""
    monkeypatch.setenv("DYN_EVENT_PLANE", "zmq")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "kv"))
    monkeypatch.setenv("ZBUS_WIRE", "dynamo")
    return Records(tmp_path / "kv")


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq_context() as made:
        yield made


async def publisher_for(bus: zbus.Bus, kind: str) -> EventPublisher:
    made: EventPublisher = await getattr(EventPublisher, f"for_{kind}")(SCOPES[kind](bus), "kv-events")
    return made


async def subscriber_for(bus: zbus.Bus, kind: str) -> EventSubscriber:
    made: EventSubscriber = await getattr(EventSubscriber, f"for_{kind}")(SCOPES[kind](bus), "kv-events")
    return made


@pytest.mark.parametrize("kind", list(SCOPES))
async def test_publishers_and_subscribers_meet_those_of_dynamo_on_nats(on_nats: NatsPeer, kind: str) -> None:
    here = subject(*NAMES[kind], "kv-events")
    await asyncio.to_thread(on_nats.subscribe, here)
    async with zbus.open() as bus, await subscriber_for(bus, kind) as subscriber:
        publisher = await publisher_for(bus, kind)
        await publisher.publish(b"from zbus")
        where, received = await asyncio.to_thread(on_nats.next)
        await asyncio.to_thread(on_nats.publish, here, envelope(7, 0, "kv-events", b"from dynamo"))
        events = [await asyncio.wait_for(subscriber.next(), WAIT_S) for _ in range(2)]

    assert (where, received["payload"], received["topic"]) == (here, b"from zbus", "kv-events")
    assert (received["publisher_id"], received["sequence"]) == (publisher.publisher_id, 0)
    assert [event.payload for event in events if event] == [b"from zbus", b"from dynamo"]
    assert {event.key for event in events if event} == {"/".join((*NAMES[kind], "kv-events"))}


@pytest.mark.parametrize("kind", list(SCOPES))
async def test_publishers_and_subscribers_meet_those_of_dynamo_on_zmq(on_zmq: Records, context: Any, kind: str) -> None:
    names = (*NAMES[kind], "kv-events")
    with closing_all() as keep:
        far, near = keep(ZmqSubscriber(context, names, on_zmq)), keep(ZmqPublisher(context, names))
        on_zmq.add(names, near.publisher_id, near.endpoint)
        async with zbus.open() as bus, await subscriber_for(bus, kind) as subscriber:
            publisher = await publisher_for(bus, kind)
            await publisher.publish(b"from zbus")
            received = await asyncio.to_thread(far.next)
            assert (await asyncio.wait_for(subscriber.next(), WAIT_S) or received).payload == b"from zbus"
            event = await _published_until_received(near, subscriber)

    assert (received["payload"], received["topic"]) == (b"from zbus", "kv-events")
    assert (received["publisher_id"], received["sequence"]) == (publisher.publisher_id, 0)
    assert (event.payload, event.key, event.publisher_id) == (b"from dynamo", "/".join(names), near.publisher_id)


@pytest.mark.parametrize("plane", ["nats", "zmq"])
async def test_two_buses_with_logs_exchange_a_thousand_events_in_order(
    plane: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"on_{plane}")
    async with zbus.open(str(tmp_path / "a.db")) as one, zbus.open(str(tmp_path / "b.db")) as two:
        async with two.subscribe("shop/**", queue_events=5000) as subscription:
            publisher = await one.publisher("shop/orders/created")
            await publisher.publish_many([b"%d" % n for n in range(1000)])
            received = [await asyncio.wait_for(anext(subscription), WAIT_S) for _ in range(1000)]

    assert [event.payload for event in received] == [b"%d" % n for n in range(1000)]
    assert {event.publisher_id for event in received} == {publisher.publisher_id}


@pytest.mark.parametrize("plane", ["nats", "zmq"])
async def test_a_request_on_this_wire_is_an_error_that_names_what_is_unsupported(
    plane: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"on_{plane}")
    async with zbus.open() as bus:
        with pytest.raises(TransportUnsupported, match="dynamo"):
            await bus.request("ns/t", b"?", timeout=2.0)


async def test_headers_stay_behind_and_the_diagnostics_say_so(on_nats: NatsPeer) -> None:
    await asyncio.to_thread(on_nats.subscribe, subject("ns", "t"))
    async with zbus.open() as bus:
        publisher = await bus.publisher("ns/t")
        await publisher.publish(b"x", headers={"traceparent": "00-1"})
        await asyncio.to_thread(on_nats.next)
        assert "headers_dropped" in str(bus.diagnostics())


async def _published_until_received(near: ZmqPublisher, subscriber: EventSubscriber) -> Any:
    """A PUB socket of Dynamo drops what it sends before a subscription reached it."""
    for _ in range(200):
        near.publish(b"from dynamo")
        try:
            return await asyncio.wait_for(asyncio.shield(_next(subscriber)), 0.2)
        except TimeoutError:
            continue
    raise AssertionError("nothing was heard")


async def _next(subscriber: EventSubscriber) -> Any:
    return await subscriber.next()
