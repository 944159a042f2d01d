"""How long until a running subscriber receives the first event of a publisher that has just started?

Each publisher is a fresh process with a fresh connection; the time runs from its call of `publish` to the body of
`async for` (the machine's monotonic clock, the same in both). The time including opening the bus is stored too. A slow
start must not be hidden by an average, so the value is the 99th percentile: the worst of 50.

The peers do the same with the bare library as far as possible: nats-py publishes immediately; zenoh and pyzmq wait
until they know of a subscriber, since earlier messages would be lost, and pyzmq gets the subscriber's address.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nats
import zenoh
import zmq
from _ends import End, free_port, report, wait_for_turn
from _harness import Measurement, Row, Sizes, compare, folder, percentile_us, run_one, zbus_versions, zenoh_versions
from _nats import nats_server, peer_versions
from _zbus_ends import KEY, peer_to_peer
from nats.aio.msg import Msg
from on_zenoh import await_subscriber, bare_config

COMMAND = Path(sys.executable).with_name("zbus")
# Not the key of zbus: both sides use the same server and router at the same time.
PLAIN_KEY, SUBJECT = "plain/orders/created", "plain.orders.created"
TARGET_MS = 1000.0
FIRST_S = 30.0
STAMP_BYTES = 8


@dataclass(frozen=True)
class Case:
    """One transport: the settings of the subscriber and publisher of zbus, and of the bare library."""

    where: str
    ours: tuple[dict[str, Any], dict[str, Any]]
    peer: str
    theirs: tuple[dict[str, Any], dict[str, Any]]
    versions: dict[str, str]


def rows(sizes: Sizes) -> list[Row]:
    """Measure one row for each transport."""
    with folder() as where, nats_server(where / "nats", sync_always=False) as url, _router() as router:
        (where / "zmq").mkdir(mode=0o700)
        return [_row(case, sizes.of(50, 1)) for case in _cases(url, router, where / "zmq")]


def _cases(nats_url: str, router: str, registry: Path) -> list[Case]:
    link, place = {"listen": f"tcp/127.0.0.1:{free_port()}"}, {"endpoint": f"tcp://127.0.0.1:{free_port()}"}
    client, bare_client = {"mode": "client", "connect": [router]}, {"mode": "client", "connect": router}
    on_nats, on_zmq = {"transport": nats_url}, {"transport": f"zmq://?registry={registry}"}
    pyzmq = {"pyzmq": version("pyzmq"), "libzmq": zmq.zmq_version()}
    bare_peers = link, {"connect": link["listen"]}
    return [
        Case("Zenoh, peer to peer", peer_to_peer(free_port()), "zenoh", bare_peers, zenoh_versions()),
        Case("Zenoh, through a router", (client, client), "zenoh", (bare_client, bare_client), zenoh_versions()),
        Case("NATS", (on_nats, on_nats), "nats-py", ({"url": nats_url}, {"url": nats_url}), peer_versions()),
        Case("ZMQ", (on_zmq, on_zmq), "pyzmq", (place, place), pyzmq),
    ]


def _row(case: Case, publishers: int) -> Row:
    function = case.peer.replace("-", "_")
    found: list[tuple[dict[str, int], dict[str, int]]] = []
    with (
        End("found_after_start", "subscriber", {"settings": case.ours[0]}) as our_subscriber,
        End("found_after_start", f"{function}_subscriber", case.theirs[0]) as their_subscriber,
    ):
        our_subscriber.receive()
        their_subscriber.receive()
        for _ in range(publishers):
            ours = _first(our_subscriber, "publisher", {"settings": case.ours[1]})
            found.append((ours, _first(their_subscriber, f"{function}_publisher", case.theirs[1])))
    return compare(
        "found_after_start",
        f"a new publisher's first event at a running subscriber, p99, on {case.where}",
        unit="ms",
        peer_name=case.peer,
        rounds=[(_p99([ours for ours, _ in found]), _p99([theirs for _, theirs in found]))],
        target=TARGET_MS,
        target_is="zbus at most",
        versions={"zbus": zbus_versions(), "peer": case.versions},
        publishers=publishers,
        with_opening_the_bus_ms=sorted(ours["with_opening_ns"] / 1e6 for ours, _ in found),
    )


def _p99(found: list[dict[str, int]]) -> Measurement:
    durations = [each["took_ns"] for each in found]
    return Measurement((percentile_us(durations, 99) or 0.0) / 1000, durations)


def _first(subscriber_end: End, function: str, arguments: dict[str, Any]) -> dict[str, int]:
    """Start a publisher and measure the latency of its first event."""
    with End("found_after_start", function, arguments) as publishing:
        sent = publishing.receive(FIRST_S)
        received = subscriber_end.receive(FIRST_S)
        return {
            "took_ns": received["at_ns"] - received["begin_ns"],
            "with_opening_ns": received["at_ns"] - sent["opening_ns"],
        }


@contextmanager
def _router() -> Iterator[str]:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    with End.command(str(COMMAND), "router", "--listen", endpoint) as router:
        router.receive()
        yield endpoint


def _received(payload: bytes) -> None:
    if len(payload) != STAMP_BYTES:
        raise RuntimeError("something else was received than what this benchmark sends")
    report(at_ns=time.monotonic_ns(), begin_ns=int.from_bytes(payload))


def _now() -> bytes:
    return time.monotonic_ns().to_bytes(STAMP_BYTES)


# zbus.


async def subscriber(settings: dict[str, Any]) -> None:
    import zbus

    async with zbus.open(**settings) as bus, bus.subscribe(KEY) as subscription:
        report(ready=True)
        leaving = asyncio.create_task(_end_on_request(subscription))
        async for event in subscription:
            _received(event.payload)
        await leaving


async def _end_on_request(subscription: Any) -> None:
    await asyncio.to_thread(wait_for_turn)
    await subscription.aclose()


async def publisher(settings: dict[str, Any]) -> None:
    import zbus

    opening = time.monotonic_ns()
    async with zbus.open(**settings) as bus:
        made = await bus.publisher(KEY)
        await made.publish(_now())
        report(opening_ns=opening)
        await asyncio.to_thread(wait_for_turn)


# The bare libraries.


async def nats_py_subscriber(url: str) -> None:
    async def received(message: Msg) -> None:
        _received(message.data)

    client = await nats.connect(url)
    await client.subscribe(SUBJECT, cb=received)
    await client.flush()
    report(ready=True)
    await asyncio.to_thread(wait_for_turn)
    await client.close()


async def nats_py_publisher(url: str) -> None:
    opening = time.monotonic_ns()
    client = await nats.connect(url)
    await client.publish(SUBJECT, _now())
    await client.flush()
    report(opening_ns=opening)
    await asyncio.to_thread(wait_for_turn)
    await client.close()


def zenoh_subscriber(**place: str) -> None:
    with zenoh.open(bare_config(**place)) as session:
        session.declare_subscriber(PLAIN_KEY, lambda sample: _received(sample.payload.to_bytes()))
        report(ready=True)
        wait_for_turn()


def zenoh_publisher(**place: str) -> None:
    opening = time.monotonic_ns()
    with zenoh.open(bare_config(**place)) as session:
        begin = _now()
        made = session.declare_publisher(PLAIN_KEY)
        await_subscriber(made)
        made.put(begin)
        report(opening_ns=opening)
        wait_for_turn()


def pyzmq_subscriber(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"bench")
        socket.bind(endpoint)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        report(ready=True)
        while sys.stdin.fileno() not in (readable := dict(poller.poll())):
            if socket in readable:
                _received(socket.recv_multipart()[1])


def pyzmq_publisher(endpoint: str) -> None:
    opening = time.monotonic_ns()
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        begin = _now()
        socket.connect(endpoint)
        socket.recv()  # the subscription
        socket.send_multipart((b"bench", begin))
        report(opening_ns=opening)
        wait_for_turn()


if __name__ == "__main__":
    run_one(rows)
