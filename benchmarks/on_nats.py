"""On NATS: how much of bare nats-py's rate, publish → callback, does zbus reach, publish → `async for`?

Both sides use a publishing process, a receiving process and a real nats-server. The peer uses nats-py like its
documentation: `await client.publish` in a loop, then `flush`, and a subscription with a callback. zbus awaits each
`publish`, without a log. Latencies are of single events on an idle connection.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import nats
from _ends import Plan, ReceiveCounter, measure, publish_in_turns, report, wait_for_turn
from _harness import Row, Sizes, alternate, compare, folder, median_of, run_one, zbus_versions
from _nats import nats_server, peer_versions
from nats.aio.msg import Msg

SUBJECT = "bench.orders.created"
TARGET = 0.6


def rows(sizes: Sizes) -> list[Row]:
    """Measure the rate, and that of `publish_many` as an extra value."""
    plan, rounds = Plan(sizes.of(100_000, 5000), sizes.of(500, 50)), sizes.of(5, 1)
    with folder() as where, nats_server(where / "nats", sync_always=False) as url:
        settings = {"settings": {"transport": url}}
        ours = ("_zbus_ends", "subscriber", settings), ("_zbus_ends", "publisher", settings)
        theirs = ("on_nats", "subscriber", {"url": url}), ("on_nats", "publisher", {"url": url})
        found = alternate(rounds, lambda: measure(plan, *ours), lambda: measure(plan, *theirs))
        many = [measure(plan, ours[0], ("_zbus_ends", "publisher", settings | {"many": True})) for _ in range(rounds)]
    return [
        compare(
            "on_nats",
            "on NATS, two processes: publish → `async for` vs. bare nats-py publish → callback",
            unit="events/s",
            peer_name="nats-py",
            rounds=found,
            target=TARGET,
            versions={"zbus": zbus_versions(), "peer": peer_versions()},
            events=plan.events,
            publish_many_events_s=median_of(many),
        )
    ]


async def subscriber(url: str, **plan: int) -> None:
    """Receive with bare nats-py."""
    counter, done = ReceiveCounter(Plan(**plan)), asyncio.Event()

    async def received(message: Msg) -> None:
        if counter.take(message.data):
            done.set()

    client = await _connect(url)
    await client.subscribe(SUBJECT, cb=received)
    await client.flush()
    report(ready=True)
    await done.wait()
    await asyncio.to_thread(wait_for_turn)
    await client.close()


async def publisher(url: str, **plan: int) -> None:
    """Publish with bare nats-py."""
    client = await _connect(url)
    report(ready=True)
    await publish_in_turns(Plan(**plan), partial(client.publish, SUBJECT), client.flush)
    await client.close()


async def _connect(url: str) -> Any:
    async def failed(error: Exception) -> None:  # such as a slow consumer, whose messages nats-py drops
        raise error

    return await nats.connect(url, error_cb=failed)


if __name__ == "__main__":
    run_one(rows)
