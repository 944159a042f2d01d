"""`bus.stats()` and what Prometheus is shown: the same values, computed when they are read."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inside import node_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import zbus


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def scrape(of: Any) -> dict[tuple[str, ...], float]:
    """What a server of Prometheus would read: a value by name and label values."""
    registry = CollectorRegistry()
    registry.register(zbus.metrics.collector(of))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


async def test_what_was_published_delivered_and_dropped_is_counted(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")
        async with bus.subscribe("a/**"), bus.subscribe("a/*", queue_events=4), bus.subscribe("other"):
            await publisher.publish_many([b"x"] * 10)
            await publisher.publish(b"y")
            stats = bus.stats()

            assert (stats["published"], stats["delivered"], stats["subscriptions"]) == (11, 22, 3)
            assert stats["dropped_queue_full"] == 7
            assert stats["queues"] == {"events": 15, "largest_events": 11}
            assert stats["log"]["head"] == 11
            assert stats["log"]["bytes"] > 0
            assert stats["latency"]["delivery"]["count"] == 22
            assert stats["latency"]["commit"]["count"] >= 2
            assert 0 < stats["latency"]["commit"]["p50_us"] <= stats["latency"]["commit"]["p99_us"]


async def test_without_a_log_the_same_is_counted() -> None:
    async with zbus.open() as bus, bus.subscribe("a/**"):
        await (await bus.publisher("a/b")).publish_many([b"x"] * 10)
        stats = bus.stats()
    assert (stats["published"], stats["delivered"], stats["latency"]["delivery"]["count"]) == (10, 10, 10)
    assert "log" not in stats


async def test_latencies_are_not_measured_where_metrics_are_off(log_path: Path) -> None:
    async with zbus.open(log_path, latency_metrics=False) as bus, bus.subscribe("**"):
        await (await bus.publisher("a/b")).publish(b"x")
        assert "latency" not in bus.stats()
        assert node_of(bus).stats.commit.count == node_of(bus).stats.delivery.count == 0
        assert bus.stats()["delivered"] == 1


async def test_each_durable_name_says_how_far_it_is_behind_also_of_other_processes(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/b")).publish_many([b"x"] * 10)
        async with bus.subscribe("a/**", durable="here", start="beginning") as here:
            for _ in range(4):
                event = await anext(here)
            await event.ack()
            assert bus.stats()["cursors"] == {"here": 6}
            async with zbus.open(log_path, read_only=True) as reader:
                async with reader.subscribe("a/**", durable="elsewhere", start="beginning") as elsewhere:
                    event = await anext(elsewhere)
                    await event.ack()
            await until(lambda: bus.stats()["cursors"] == {"elsewhere": 9, "here": 6})
        await until(lambda: bus.stats()["cursors"]["here"] == 6)


async def test_events_of_other_nodes_are_received_not_published(tmp_path: Path, log_path: Path) -> None:
    endpoint = f"unixsock-stream/{tmp_path}/n.sock"
    async with zbus.open(log_path, mode="peer", listen=[endpoint], keep=["**"]) as there:
        async with there.subscribe("a/**") as subscription:
            async with zbus.open("memory", mode="peer", connect=[endpoint]) as here:
                await (await here.publisher("a/b")).publish_many([b"x"] * 10)
                async with asyncio.timeout(20):
                    for _ in range(10):
                        await anext(subscription)
                (link,) = here.stats()["links"].values()
                assert (link["fabric"], link["sent"], here.stats()["published"]) == ("zenoh", 10, 10)
            stats = there.stats()
            (link,) = stats["links"].values()
            assert link["received"] >= 10
            assert (stats["published"], stats["delivered"], stats["log"]["head"]) == (0, 10, 10)


async def test_prometheus_is_shown_the_same_metrics(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        publisher = await bus.publisher("a/b")
        async with bus.subscribe("a/*", queue_events=4), bus.subscribe("a/**", durable="billing") as billing:
            await publisher.publish_many([b"x"] * 10)
            await anext(billing)  # it reads the log until it has caught up
            found = await asyncio.to_thread(scrape, bus)
            stats = bus.stats()

    assert found["zbus_events_published_total",] == stats["published"] == 10
    assert found["zbus_events_delivered_total",] == stats["delivered"] == 20
    assert found["zbus_events_dropped_total", "queue_full"] == stats["dropped_queue_full"] == 6
    assert found["zbus_subscription_queue_largest_events",] == 9
    assert found["zbus_subscriptions",] == 2
    assert found["zbus_log_head",] == 10
    assert found["zbus_cursor_lag_events", "billing"] == stats["cursors"]["billing"]
    live = stats["latency"]["delivery"]["count"]
    assert 10 <= live <= 20
    assert (
        found["zbus_delivery_latency_seconds_count",] == found["zbus_delivery_latency_seconds_bucket", "+Inf"] == live
    )
    assert found["zbus_commit_duration_seconds_count",] == stats["latency"]["commit"]["count"]


async def test_a_subscription_that_reads_the_log_is_counted_as_catching_up(log_path: Path) -> None:
    async with zbus.open(log_path) as bus:
        await (await bus.publisher("a/b")).publish_many([b"x"] * 10)
        async with bus.subscribe("a/**", start="beginning", queue_events=2), bus.subscribe("a/**"):
            stats, found = bus.stats(), await asyncio.to_thread(scrape, bus)

    assert (stats["subscriptions"], stats["subscriptions_catching_up"]) == (2, 1)
    assert found["zbus_subscriptions_catching_up",] == 1


async def test_caches_are_shown_by_their_names() -> None:
    async with zbus.open() as bus:
        todos = bus.cache(name="todos").invalidate_on("events/**")
        assert await todos.load("a", lambda: 1) == await todos.load("a", lambda: 2) == 1
        await (await bus.publisher("events/x")).publish(b"x")
        found = await asyncio.to_thread(scrape, bus)
        stats = bus.stats()

    assert stats["caches"]["todos"]["hits"] == found["zbus_cache_hits_total", "todos"] == 1
    assert (found["zbus_cache_loads_total", "todos"], found["zbus_cache_entries", "todos"]) == (1, 0)
    assert found["zbus_cache_invalidations_total", "todos"] == 1
    assert stats["delivered"] == 0  # a rule is no reader


async def test_no_key_is_ever_a_label(tmp_path: Path, log_path: Path) -> None:
    endpoint = f"unixsock-stream/{tmp_path}/n.sock"
    async with zbus.open(log_path, mode="peer", listen=[endpoint]) as bus:
        async with bus.subscribe("secret$*/**"):
            for number in range(300):
                await (await bus.publisher(f"secret{number}/x")).publish(b"x")
            registry = CollectorRegistry()
            registry.register(zbus.metrics.collector(bus))
            text = generate_latest(registry).decode()

    assert "zbus_events_published_total 300.0" in text
    assert "secret" not in text
    assert len(text.splitlines()) < 250


async def test_a_bridge_shows_what_crossed_per_direction(tmp_path: Path) -> None:
    first, second = f"unixsock-stream/{tmp_path}/a.sock", f"zmq://?registry={tmp_path}/registry"
    async with zbus.Bridge(("zenoh", second), ["shop/**"], mode="peer", listen=[first], name="link") as bridge:
        async with zbus.open(transport=second) as far, far.subscribe("shop/**") as subscription:
            async with zbus.open(mode="peer", connect=[first]) as near:
                publisher = await near.publisher("shop/orders")
                async with asyncio.timeout(30):
                    while not subscription.queued:  # the bridge announces itself in a moment
                        await publisher.publish(b"x")
                        await asyncio.sleep(0.02)
        found = await asyncio.to_thread(scrape, bridge)
    assert found["zbus_bridge_forwarded_total", "link", "forward"] >= 1
    assert found["zbus_bridge_forwarded_total", "link", "reverse"] == 0
    assert ("zbus_bridge_lag_seconds", "link", "forward") in found
    assert found["zbus_events_published_total",] == 0


async def test_counting_on_many_threads_loses_nothing() -> None:
    async with zbus.open() as bus:
        threads = [
            threading.Thread(target=lambda: [node_of(bus).count("odd", 1) for _ in range(20_000)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bus.stats()["odd"] == 80_000


def test_prometheus_is_imported_only_on_use_and_if_missing_the_error_says_how_to_install_it() -> None:
    script = """
import sys, asyncio, zbus
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "prometheus_client":
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
async def main():
    async with zbus.open("memory") as bus:
        bus.stats()
        assert "prometheus_client" not in sys.modules
        try:
            zbus.metrics.collector(bus)
        except zbus.ConfigInvalid as error:
            print(error)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert "pip install 'zbus-mesh[metrics]'" in done.stdout, done.stderr


@pytest.mark.parametrize("setting", [{"system_events": "loud"}, {"node_ttl_s": 0}, {"metadata": {"a": 1}}])
def test_settings_that_make_no_sense_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(zbus.ConfigInvalid, match=next(iter(setting))):
        zbus.open(**setting)
