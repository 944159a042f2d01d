"""On ZMQ: how much of bare pyzmq's rate, multipart PUB → SUB, does zbus reach, publish → `async for`?

A process that publishes and one that receives, on both sides, over tcp. The peer blocks in `send_multipart` and
`recv_multipart`, which is its fastest way, and has no high-water mark: it would drop without a word, and zbus
does not. Ours awaits each `publish`, without a log; the two nodes find each other by themselves. Latencies are of
single events on an idle connection.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import zmq
from _ends import End, Plan, Receipt, free_port, measure, put_in_turns, say, told
from _harness import PAYLOAD, Figure, Row, Sizes, alone, alternate, compare, folder, median_of, zbus_versions

TOPIC = b"bench/orders/created"
TARGET = 0.6
NO_LIMIT = 0


def rows(sizes: Sizes) -> list[Row]:
    """The rate, with `publish_many`, and with the peer's two threads in one process, as remarks."""
    plan, rounds = Plan(sizes.of(100_000, 5000), sizes.of(500, 50)), sizes.of(5, 1)
    with folder() as where:
        found = alternate(rounds, lambda: _ours(plan, where), lambda: _theirs(plan))
        many = [_ours(plan, where, many=True) for _ in range(rounds)]
        threads = [_theirs_in_threads(plan) for _ in range(rounds)]
    return [
        compare(
            "on_zmq",
            "on ZMQ, two processes: publish → `async for`, beside bare pyzmq multipart PUB → SUB",
            unit="events/s",
            peer_name="pyzmq",
            rounds=found,
            target=TARGET,
            versions={"zbus": zbus_versions(), "peer": {"pyzmq": version("pyzmq"), "libzmq": zmq.zmq_version()}},
            events=plan.events,
            publish_many_events_s=median_of(many),
            peer_in_threads_of_one_process_events_s=median_of(threads),
        )
    ]


def _ours(plan: Plan, where: Path, many: bool = False) -> Figure:
    settings = {"settings": {"transport": f"zmq://?registry={where}"}}
    sender = ("_zbus_ends", "publisher", settings | {"many": many})
    return measure(plan, ("_zbus_ends", "subscriber", settings), sender)


def _theirs(plan: Plan) -> Figure:
    place = {"endpoint": f"tcp://127.0.0.1:{free_port()}"}
    return measure(plan, ("on_zmq", "subscriber", place), ("on_zmq", "publisher", place))


def _theirs_in_threads(plan: Plan) -> Figure:
    with End("on_zmq", "in_threads", asdict(plan)) as end:
        return Figure(end.hears()["events_s"])


def subscriber(endpoint: str, **plan: int) -> None:
    """Bare pyzmq, receiving."""
    receipt = Receipt(Plan(**plan))
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set_hwm(NO_LIMIT)
        socket.subscribe(TOPIC)
        socket.connect(endpoint)
        say(ready=True)
        while True:
            _, payload = socket.recv_multipart()
            if receipt.take(payload):
                break
        told()


def publisher(endpoint: str, **plan: int) -> None:
    """Bare pyzmq, publishing."""
    with zmq.Context() as context, _publishing(context, endpoint) as socket:
        say(ready=True)
        put_in_turns(Plan(**plan), lambda payload: socket.send_multipart((TOPIC, payload)))


def _publishing(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A bound socket that somebody subscribes to. XPUB sends as PUB does, and tells of the subscription besides."""
    socket = context.socket(zmq.XPUB)
    socket.set_hwm(NO_LIMIT)
    socket.bind(endpoint)
    socket.recv()
    return socket


def in_threads(events: int, singles: int) -> None:
    """Both ends of bare pyzmq as threads of one process, which share its lock."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set_hwm(NO_LIMIT)
        socket.subscribe(TOPIC)
        socket.connect(endpoint)

        def receive() -> None:
            for _ in range(events):
                socket.recv_multipart()

        with _publishing(context, endpoint) as sending:
            receiving = threading.Thread(target=receive)
            begin = time.monotonic()
            receiving.start()
            for _ in range(events):
                sending.send_multipart((TOPIC, PAYLOAD))
            receiving.join()
            say(events_s=events / (time.monotonic() - begin))


if __name__ == "__main__":
    alone(rows)
