"""How much do metrics and log records cost: durable publish to delivery with both on, compared with off?

On: latencies are measured, Prometheus scrapes the bus once a second, and all log records from DEBUG up, including those
of events, are written to a file as JSON lines. Off: `latency_metrics=False`, and no configured logging.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns

from _harness import Measurement, Row, Sizes, alternate, compare, folder, run_one, zbus_versions
from durable_publish import PUBLISHERS, WARM_UP_EACH, turn
from prometheus_client import CollectorRegistry, generate_latest

import zbus
from zbus.observe.records import logger

SCRAPE_S = 1.0


def rows(sizes: Sizes) -> list[Row]:
    """Measure the row."""
    events = PUBLISHERS * sizes.of(200, 16)
    with folder() as where:
        found = alternate(sizes.of(9, 1), _measured(where, events, observed=True), _measured(where, events, False))
    return [
        compare(
            "observed",
            "durable publish → delivery with metrics and records on vs. off",
            unit="events/s",
            peer_name="off",
            rounds=found,
            target=0.95,
            versions={"zbus": zbus_versions(), "peer": {"prometheus-client": version("prometheus-client")}},
            events=events,
        )
    ]


def _measured(where: Path, events: int, observed: bool) -> Callable[[], Measurement]:
    return lambda: asyncio.run(measure(where / f"log-{time.time_ns()}.db", events, observed))


async def measure(log: Path, events: int, observed: bool) -> Measurement:
    """Measure events per second until the last one is acknowledged and delivered, and each publish."""
    async with zbus.open(log, latency_metrics=observed) as bus:
        publishers = [await bus.publisher(f"bench/orders/p{number}") for number in range(PUBLISHERS)]
        async with bus.subscribe("bench/**", overflow="spill") as subscription:
            await turn(publishers, subscription, WARM_UP_EACH)
            if not observed:
                return await _timed(publishers, subscription, events)
            async with _observed(bus, log.with_suffix(".jsonl")):
                return await _timed(publishers, subscription, events)


async def _timed(publishers: list[zbus.EventPublisher], subscription: zbus.EventSubscriber, events: int) -> Measurement:
    begin = perf_counter_ns()
    durations = await turn(publishers, subscription, events // PUBLISHERS)
    return Measurement(events / (perf_counter_ns() - begin) * 1e9, durations)


@asynccontextmanager
async def _observed(bus: zbus.Bus, lines: Path) -> AsyncIterator[None]:
    registry = CollectorRegistry()
    registry.register(zbus.metrics.collector(bus))

    async def scrape() -> None:
        while True:
            await asyncio.to_thread(generate_latest, registry)
            await asyncio.sleep(SCRAPE_S)

    level = logger.level
    with lines.open("w") as stream:
        handler = zbus.configure_logging("json", level="DEBUG", stream=stream)
        scraping = asyncio.create_task(scrape())
        try:
            yield
        finally:
            scraping.cancel()
            logger.removeHandler(handler)
            logger.setLevel(level)
    if "EVENT_PUBLISHED" not in lines.read_text():
        raise AssertionError("no record was written: this measures nothing")


if __name__ == "__main__":
    run_one(rows)
