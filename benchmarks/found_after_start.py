"""How long until a running subscriber has the first event of a publisher that has just started?

Each publisher is a fresh process with a fresh connection; the time runs from its call of `publish` to the body of
`async for` (the machine's monotonic clock, the same in both). How long it takes with opening the bus is a remark.
A slow start must not hide in the average, so the figure is the 99th percentile: of 50, the worst.

The peers do the same with the bare library, as far as it can: nats-py publishes at once; zenoh and pyzmq wait until
they know of a subscriber, since what they send before is lost, and pyzmq is told where the subscriber is.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from typing import Any

import nats
import zenoh
import zmq
from _ends import End, free_port, say, told
from _harness import Figure, Row, Sizes, alone, compare, folder, percentile_us, zbus_versions, zenoh_versions
from _nats import nats_server, peer_versions
from _zbus_ends import KEY, peer_to_peer
from nats.aio.msg import Msg
from on_zenoh import await_subscriber, bare_config

COMMAND = Path(sys.executable).with_name("zbus")
SUBJECT = "bench.orders.created"
TARGET_MS = 1000.0
FIRST_S = 30.0


def rows(sizes: Sizes) -> list[Row]:
    """One row for each transport."""
    publishers = sizes.of(50, 2)
    with folder() as where, nats_server(where / "nats", sync_always=False) as url, _router() as router:
        (where / "zmq").mkdir(mode=0o700)
        listening, connecting = peer_to_peer(free_port())
        client = {"transport": f"zenoh://127.0.0.1:{router}"}
        on_zmq = {"transport": f"zmq://?registry={where / 'zmq'}"}
        link, place = f"tcp/127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
        routed = {"mode": "client", "connect": f"tcp/127.0.0.1:{router}"}
        zmq_versions = {"pyzmq": version("pyzmq"), "libzmq": zmq.zmq_version()}
        return [
            _row("Zenoh, peer to peer", publishers, (listening, connecting), "zenoh", zenoh_versions(), (
                {"listen": link}, {"connect": link})),
            _row("Zenoh, through a router", publishers, (client, client), "zenoh", zenoh_versions(), (routed, routed)),
            _row("NATS", publishers, ({"transport": url},) * 2, "nats", peer_versions(), ({"url": url},) * 2),
            _row("ZMQ", publishers, (on_zmq, on_zmq), "pyzmq", zmq_versions, ({"endpoint": place},) * 2),
        ]  # fmt: skip


def _row(
    where: str,
    publishers: int,
    ours: tuple[dict[str, Any], dict[str, Any]],
    peer: str,
    versions: dict[str, str],
    theirs: tuple[dict[str, Any], dict[str, Any]],
) -> Row:
    with (
        End("found_after_start", "subscriber", {"settings": ours[0]}) as hears_us,
        End("found_after_start", f"{peer}_subscriber", theirs[0]) as hears_them,
    ):
        hears_us.hears()
        hears_them.hears()
        found: dict[str, list[dict[str, int]]] = {"zbus": [], "peer": []}
        for _ in range(publishers):
            found["zbus"].append(_first(hears_us, "publisher", {"settings": ours[1]}))
            found["peer"].append(_first(hears_them, f"{peer}_publisher", theirs[1]))
    return compare(
        "found_after_start",
        f"a new publisher's first event at a running subscriber, p99, on {where}",
        unit="ms",
        peer_name=peer,
        rounds=[(_p99(found["zbus"]), _p99(found["peer"]))],
        target=TARGET_MS,
        target_is="zbus at most",
        versions={"zbus": zbus_versions(), "peer": versions},
        publishers=publishers,
        opening_included_ms=sorted(each["with_opening_ns"] / 1e6 for each in found["zbus"]),
    )


def _p99(found: list[dict[str, int]]) -> Figure:
    durations = [each["took_ns"] for each in found]
    return Figure((percentile_us(durations, 99) or 0.0) / 1000, durations)


def _first(hearing: End, function: str, arguments: dict[str, Any]) -> dict[str, int]:
    """Start a publisher; how long its first event took."""
    with End("found_after_start", function, arguments) as publishing:
        sent = publishing.hears(FIRST_S)
        received = hearing.hears(FIRST_S)
        return {
            "took_ns": received["at_ns"] - received["begin_ns"],
            "with_opening_ns": received["at_ns"] - sent["opening_ns"],
        }


@contextmanager
def _router() -> Iterator[int]:
    port = free_port()
    with End.command(str(COMMAND), "router", "--listen", f"tcp/127.0.0.1:{port}") as router:
        router.hears()
        yield port


def _received(payload: bytes) -> None:
    say(at_ns=time.monotonic_ns(), begin_ns=int.from_bytes(payload))


def _now() -> bytes:
    return time.monotonic_ns().to_bytes(8)


# zbus.


async def subscriber(settings: dict[str, Any]) -> None:
    import zbus

    async with zbus.open(**settings) as bus, bus.subscribe(KEY) as subscription:
        say(ready=True)
        leaving = asyncio.create_task(_end_when_told(subscription))
        async for event in subscription:
            _received(event.payload)
        await leaving


async def _end_when_told(subscription: Any) -> None:
    await asyncio.to_thread(told)
    await subscription.aclose()


async def publisher(settings: dict[str, Any]) -> None:
    import zbus

    opening = time.monotonic_ns()
    async with zbus.open(**settings) as bus:
        made = await bus.publisher(KEY)
        await made.publish(_now())
        say(opening_ns=opening)
        await asyncio.to_thread(told)


# The bare libraries.


async def nats_subscriber(url: str) -> None:
    async def received(message: Msg) -> None:
        _received(message.data)

    client = await nats.connect(url)
    await client.subscribe(SUBJECT, cb=received)
    await client.flush()
    say(ready=True)
    await asyncio.to_thread(told)
    await client.close()


async def nats_publisher(url: str) -> None:
    opening = time.monotonic_ns()
    client = await nats.connect(url)
    await client.publish(SUBJECT, _now())
    await client.flush()
    say(opening_ns=opening)
    await asyncio.to_thread(told)
    await client.close()


def zenoh_subscriber(**place: str) -> None:
    with zenoh.open(bare_config(**place)) as session:
        session.declare_subscriber(KEY, lambda sample: _received(sample.payload.to_bytes()))
        say(ready=True)
        told()


def zenoh_publisher(**place: str) -> None:
    opening = time.monotonic_ns()
    with zenoh.open(bare_config(**place)) as session:
        begin = _now()
        made = session.declare_publisher(KEY)
        await_subscriber(made)
        made.put(begin)
        say(opening_ns=opening)
        told()


def pyzmq_subscriber(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"bench")
        socket.bind(endpoint)
        say(ready=True)
        threading.Thread(target=_receive, args=(socket,), daemon=True).start()
        told()
        os._exit(0)


def _receive(socket: zmq.Socket[bytes]) -> None:
    while True:
        _received(socket.recv_multipart()[1])


def pyzmq_publisher(endpoint: str) -> None:
    opening = time.monotonic_ns()
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        begin = _now()
        socket.connect(endpoint)
        socket.recv()  # the subscription
        socket.send_multipart((b"bench", begin))
        say(opening_ns=opening)
        told()


if __name__ == "__main__":
    alone(rows)
