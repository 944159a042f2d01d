"""On Zenoh over tcp: how much of bare zenoh's rate between two processes does zbus reach, publish → `async for`?

Both sides use two Zenoh peers, of which one listens, and no router. The bare peer uses a declared publisher that blocks
when the network is slow (the alternative drops), and reads each payload in the default callback. zbus awaits each
`publish`, without a log. Latencies are of single events on an idle link.
"""

from __future__ import annotations

import json
import threading
import time

import zenoh
from _ends import Plan, ReceiveCounter, free_port, measure, put_in_turns, report, wait_for_turn
from _harness import Measurement, Row, Sizes, alternate, compare, median_of, run_one, zbus_versions, zenoh_versions
from _zbus_ends import KEY, peer_to_peer

TARGET = 0.5


def rows(sizes: Sizes) -> list[Row]:
    """Measure the rate, and that of `publish_many` as an extra value."""
    plan, rounds = Plan(sizes.of(100_000, 5000), sizes.of(500, 50)), sizes.of(5, 1)
    found = alternate(rounds, lambda: _ours(plan), lambda: _theirs(plan))
    many = [_ours(plan, many=True) for _ in range(rounds)]
    return [
        compare(
            "on_zenoh",
            "on Zenoh over tcp, two processes: publish → `async for` vs. bare zenoh `put` → default callback",
            unit="events/s",
            peer_name="zenoh",
            rounds=found,
            target=TARGET,
            versions={"zbus": zbus_versions(), "peer": zenoh_versions()},
            events=plan.events,
            publish_many_events_s=median_of(many),
        )
    ]


def _ours(plan: Plan, many: bool = False) -> Measurement:
    listening, connecting = peer_to_peer(free_port())
    sender = ("_zbus_ends", "publisher", {"settings": connecting, "many": many})
    return measure(plan, ("_zbus_ends", "subscriber", {"settings": listening}), sender)


def _theirs(plan: Plan) -> Measurement:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    return measure(
        plan, ("on_zenoh", "subscriber", {"listen": endpoint}), ("on_zenoh", "publisher", {"connect": endpoint})
    )


def subscriber(listen: str, **plan: int) -> None:
    """Receive with bare zenoh."""
    counter, done = ReceiveCounter(Plan(**plan)), threading.Event()

    def received(sample: zenoh.Sample) -> None:
        if counter.take(sample.payload.to_bytes()):
            done.set()

    with zenoh.open(bare_config(listen=listen)) as session:
        session.declare_subscriber(KEY, received)
        report(ready=True)
        done.wait()
        wait_for_turn()


def publisher(connect: str, **plan: int) -> None:
    """Publish with bare zenoh."""
    with zenoh.open(bare_config(connect=connect)) as session:
        made = session.declare_publisher(KEY, congestion_control=zenoh.CongestionControl.BLOCK)
        await_subscriber(made)
        report(ready=True)
        put_in_turns(Plan(**plan), made.put)


def await_subscriber(publisher: zenoh.Publisher) -> None:
    """Wait until zenoh knows a matching subscriber."""
    while not publisher.matching_status.matching:  # type: ignore[attr-defined]
        time.sleep(0.001)


def bare_config(mode: str = "peer", listen: str = "", connect: str = "") -> zenoh.Config:
    """Open a session with one link and without discovery."""
    config = zenoh.Config()
    settings = {
        "mode": mode,
        "listen/endpoints": [listen] if listen else [],
        "connect/endpoints": [connect] if connect else [],
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "transport/shared_memory/enabled": False,
    }
    for name, value in settings.items():
        config.insert_json5(name, json.dumps(value))
    return config


if __name__ == "__main__":
    run_one(rows)
