"""How fast does a replay convert stored rows to `Event` objects, compared with a bare scan and a JetStream pull?

The bare scan fetches the same rows of the same file as tuples and does nothing with them. The pull
consumer fetches batches of 1,000 through nats-py and acknowledges each batch with one message
(`AckPolicy.ALL`), which was measured to be faster than batches of 100 and than an acknowledgement
per message. JetStream's ordered push consumer is several times faster than its pull consumer; its
rate is stored in the same row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import _nats
import apsw
from _harness import (
    PAYLOAD,
    Measurement,
    Row,
    Sizes,
    alternate,
    compare,
    folder,
    run_one,
    settled,
    sqlite_versions,
    zbus_versions,
)
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

import zbus

KEYS = 256
BATCH = 1000
TARGET_SCAN, TARGET_PULL = 0.4, 10.0


def rows(sizes: Sizes) -> list[Row]:
    """Measure both rows, over logs of the same events."""
    events = sizes.of(100_000, 5000)
    with folder() as where:
        log = where / "log.db"
        asyncio.run(fill(log, events))
        return [
            _against_scan(log, events, sizes.of(5, 1)),
            _against_pull(log, events, sizes.of(3, 1), where / "nats"),
        ]


def _against_scan(log: Path, events: int, rounds: int) -> Row:
    return compare(
        "replay",
        "replay to `Event` objects vs. a bare sqlite3 scan of the same rows",
        unit="events/s",
        peer_name="apsw",
        rounds=alternate(rounds, _ours(log, events), lambda: scan(log, events)),
        target=TARGET_SCAN,
        versions={"zbus": zbus_versions(), "peer": sqlite_versions()},
        events=events,
    )


def _against_pull(log: Path, events: int, rounds: int, where: Path) -> Row:
    with _nats.nats_server(where, sync_always=False) as url:
        with asyncio.Runner() as runner:
            stream_ = _nats.fresh_stream(url)
            stream = runner.run(stream_.__aenter__())
            runner.run(_nats.publish(stream, events))
            runner.run(_nats.expect_stored(stream, events))
            found = alternate(rounds, _ours(log, events), lambda: runner.run(pull(stream, events)))
            pushed = [settled(lambda: runner.run(push(stream, events))).value for _ in range(rounds)]
            runner.run(stream_.__aexit__(None, None, None))
    return compare(
        "replay",
        "the same vs. a JetStream pull consumer through nats-py",
        unit="events/s",
        peer_name="JetStream pull",
        rounds=found,
        target=TARGET_PULL,
        versions={"zbus": zbus_versions(), "peer": _nats.peer_versions()},
        events=events,
        peer_ordered_push=pushed,
    )


def _ours(log: Path, events: int) -> Callable[[], Measurement]:
    return lambda: asyncio.run(measure_zbus(log, events))


async def fill(log: Path, events: int) -> None:
    """Create a log of `events` events over some keys."""
    async with zbus.open(log) as bus:
        for number in range(KEYS):
            publisher = await bus.publisher(f"bench/orders/p{number}")
            await publisher.publish_many([PAYLOAD] * (events // KEYS + (number < events % KEYS)))


async def measure_zbus(log: Path, events: int) -> Measurement:
    """Measure events per second through `bus.replay`."""
    async with zbus.open(log) as bus:
        async for _ in bus.replay(until=BATCH):
            pass
        begin = perf_counter_ns()
        seen = 0
        async for _ in bus.replay():
            seen += 1
        elapsed = perf_counter_ns() - begin
    _expect("zbus", seen, events)
    return Measurement(events / elapsed * 1e9)


def scan(log: Path, events: int) -> Measurement:
    """Measure rows per second through the bare driver."""
    connection = apsw.Connection(str(log), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        for _ in connection.execute("SELECT * FROM events LIMIT ?", (BATCH,)):
            pass
        begin = perf_counter_ns()
        seen = 0
        for _ in connection.execute("SELECT * FROM events"):
            seen += 1
        elapsed = perf_counter_ns() - begin
    finally:
        connection.close()
    _expect("the bare scan", seen, events)
    return Measurement(events / elapsed * 1e9)


async def pull(stream: JetStreamContext, events: int) -> Measurement:
    """Measure messages per second through a pull consumer that fetches and acknowledges in batches."""
    config = ConsumerConfig(ack_policy=AckPolicy.ALL, deliver_policy=DeliverPolicy.ALL, max_ack_pending=10 * BATCH)
    consumer = await stream.pull_subscribe("bench.>", stream=_nats.STREAM, config=config)
    seen = 0
    begin = perf_counter_ns()
    while seen < events:
        batch = await consumer.fetch(min(BATCH, events - seen), timeout=10)
        await batch[-1].ack()
        seen += len(batch)
    elapsed = perf_counter_ns() - begin
    await consumer.unsubscribe()
    return Measurement(events / elapsed * 1e9)


async def push(stream: JetStreamContext, events: int) -> Measurement:
    """Measure messages per second to the callback of an ordered push consumer, without acknowledgements."""
    begin = perf_counter_ns()
    done = await _nats.delivery(stream, events)
    await asyncio.wait_for(done.wait(), _nats.WAIT_S)
    return Measurement(events / (perf_counter_ns() - begin) * 1e9)


def _expect(who: str, seen: int, events: int) -> None:
    if seen != events:
        raise RuntimeError(f"{who} read {seen} of {events} events")


if __name__ == "__main__":
    run_one(rows)
