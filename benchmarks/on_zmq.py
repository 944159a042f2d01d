"""On ZMQ: how much of bare pyzmq's rate, multipart PUB → SUB, does zbus reach, publish → `async for`?

Both sides use a publishing and a receiving process over tcp. The peer blocks in `send_multipart` and `recv_multipart`,
its fastest calls, and has no high-water mark, at which it would drop messages silently, unlike zbus. zbus awaits each
`publish`, without a log; its two nodes discover each other. Latencies are of single events on an idle connection.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import zmq
from _ends import End, Plan, ReceiveCounter, free_port, measure, put_in_turns, report, wait_for_turn
from _harness import PAYLOAD, Measurement, Row, Sizes, alternate, compare, folder, median_of, run_one, zbus_versions

TOPIC = b"bench/orders/created"
TARGET = 0.6
NO_LIMIT = 0


def rows(sizes: Sizes) -> list[Row]:
    """Measure the rate; `publish_many` and the peer with two threads in one process are extra values."""
    plan, rounds = Plan(sizes.of(100_000, 5000), sizes.of(500, 50)), sizes.of(5, 1)
    with folder() as where:
        found = alternate(rounds, lambda: _ours(plan, where), lambda: _theirs(plan))
        many = [_ours(plan, where, many=True) for _ in range(rounds)]
        threads = [_theirs_in_threads(plan) for _ in range(rounds)]
    return [
        compare(
            "on_zmq",
            "on ZMQ, two processes: publish → `async for` vs. bare pyzmq multipart PUB → SUB",
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


def _ours(plan: Plan, where: Path, many: bool = False) -> Measurement:
    settings = {"settings": {"transport": f"zmq://?registry={where}"}}
    sender = ("_zbus_ends", "publisher", settings | {"many": many})
    return measure(plan, ("_zbus_ends", "subscriber", settings), sender)


def _theirs(plan: Plan) -> Measurement:
    place = {"endpoint": f"tcp://127.0.0.1:{free_port()}"}
    return measure(plan, ("on_zmq", "subscriber", place), ("on_zmq", "publisher", place))


def _theirs_in_threads(plan: Plan) -> Measurement:
    with End("on_zmq", "in_threads", asdict(plan)) as end:
        return Measurement(end.receive()["events_s"])


def subscriber(endpoint: str, **plan: int) -> None:
    """Receive with bare pyzmq."""
    counter = ReceiveCounter(Plan(**plan))
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set_hwm(NO_LIMIT)
        socket.subscribe(TOPIC)
        socket.connect(endpoint)
        report(ready=True)
        while True:
            _, payload = socket.recv_multipart()
            if counter.take(payload):
                break
        wait_for_turn()


def publisher(endpoint: str, **plan: int) -> None:
    """Publish with bare pyzmq."""
    with zmq.Context() as context, _publishing(context, endpoint) as socket:
        report(ready=True)
        put_in_turns(Plan(**plan), lambda payload: socket.send_multipart((TOPIC, payload)))


def _publishing(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Bind a socket and wait for a subscriber. XPUB sends like PUB, and also receives subscriptions."""
    socket = context.socket(zmq.XPUB)
    socket.set_hwm(NO_LIMIT)
    socket.bind(endpoint)
    socket.recv()
    return socket


def in_threads(events: int, singles: int) -> None:
    """Run both ends of bare pyzmq as threads of one process, which share its interpreter lock."""
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
            report(events_s=events / (time.monotonic() - begin))


if __name__ == "__main__":
    run_one(rows)
