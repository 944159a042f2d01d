"""How much of bare nats-py's receive rate does a raw bridge to Zenoh reach?

Bare nats-py publishes the same plain messages on both sides through a real nats-server. The peer receives them with
nats-py's callback. zbus: `zbus bridge --raw` converts them to events and forwards them over Zenoh to another process,
which reads them with `async for`. Neither side has a log. Latencies are of single messages.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from _ends import End, Plan, free_port, measure
from _harness import Measurement, Row, Sizes, alternate, compare, folder, median_of, run_one, zbus_versions
from _nats import nats_server, peer_versions
from _zbus_ends import peer_to_peer

COMMAND = Path(sys.executable).with_name("zbus")
TARGET = 0.5


def rows(sizes: Sizes) -> list[Row]:
    """Measure the rate, and that of a bridge with a log as an extra value."""
    plan, rounds = Plan(sizes.of(100_000, 5000), sizes.of(500, 50)), sizes.of(5, 1)
    with folder() as where, nats_server(where / "nats", sync_always=False) as url:
        plain = ("on_nats", "publisher", {"url": url})
        found = alternate(
            rounds,
            lambda: _ours(plan, url),
            lambda: measure(plan, ("on_nats", "subscriber", {"url": url}), plain),
        )
        logged = [_ours(plan, url, where / f"{round_}.db") for round_ in range(rounds)]
    return [
        compare(
            "raw_bridge",
            "raw bridge: plain NATS messages → Zenoh → `async for` vs. bare nats-py receiving them",
            unit="events/s",
            peer_name="nats-py",
            rounds=found,
            target=TARGET,
            versions={"zbus": zbus_versions(), "peer": peer_versions()},
            events=plan.events,
            with_a_log_events_s=median_of(logged),
        )
    ]


def _ours(plan: Plan, url: str, log: Path | None = None) -> Measurement:
    port = free_port()
    listening, _ = peer_to_peer(port)
    crossing = ["--between", url, "zenoh://", "--mode", "peer", "--connect", f"tcp/127.0.0.1:{port}"]
    options = ["--keys", "bench/**", "--direction", "forward", "--raw", "--report-interval", "0"]
    bridge = partial(End.command, str(COMMAND), "bridge", *crossing, *options, *(["--log", str(log)] if log else []))
    return measure(
        plan, ("_zbus_ends", "subscriber", {"settings": listening}), ("on_nats", "publisher", {"url": url}), bridge
    )


if __name__ == "__main__":
    run_one(rows)
