"""The figures of a bus or a bridge for Prometheus: made from `stats()` when they are asked for, and never before.

    from prometheus_client import REGISTRY
    REGISTRY.register(zbus.metrics.collector(bus))

This is the one place that imports prometheus-client. Labels are names of transports, durable names, bridges, caches
and reasons, of which there are few; never a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .bridge.bridge import Bridge
from .errors import ConfigInvalid
from .observe.histogram import BOUNDS_US

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import Collector

    from . import blocking
    from .bus import Bus

INSTALL = "pip install 'zbus-mesh[metrics]'"
LABELS_MAX = 100  # values of one label; what is beyond is left out, and counted

# Counters that have a name of their own; all others go to zbus_counts_total by name. `dropped_…` is by reason.
_COUNTERS = {
    "published": "Events that were published here and stored, or handed on where there is no log",
    "delivered": "Events that reached the queues of subscriptions, once for each subscription",
    "redelivered": "Events that were handed to a handler again because it had failed",
    "gaps": "Holes found in what other nodes sent",
    "gaps_repaired": "Holes that were filled from a log",
    "gaps_unrepaired": "Holes that nobody could fill",
    "events_repaired": "Events fetched from the logs of other nodes",
    "duplicates_received": "Events that came again and were known by their identity",
    "backpressure": "Times at which publishers had to wait",
}
_CACHE = ("hits", "misses", "loads", "load_errors", "invalidations", "evictions")


def collector(of: Bus | blocking.Bus | Bridge) -> Collector:
    """What `prometheus_client.REGISTRY.register` takes, for a bus or a bridge.

    Raises `ConfigInvalid` with the line that installs prometheus-client where it is missing.
    """
    try:
        from prometheus_client.registry import Collector as Base
    except ImportError as error:
        raise ConfigInvalid("metrics", f"it needs prometheus_client, which is missing: {INSTALL}") from error

    class Figures(Base):
        def collect(self) -> Iterator[Metric]:
            """Called by a scrape, on any thread."""
            if isinstance(of, Bridge):
                yield from _bridge(of.stats())
            yield from _bus(of.node_stats() if isinstance(of, Bridge) else of.stats())

        def describe(self) -> list[Metric]:
            return []  # registering asks for no figures

    return Figures()


def _bus(stats: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"zbus_{name}", text, value=stats.get(name, 0))
    dropped = CounterMetricFamily("zbus_dropped", "Events that were dropped, by reason", labels=["reason"])
    counts = CounterMetricFamily("zbus_counts", "Everything else that is counted, by name", labels=["name"])
    for name, value in stats.items():
        if isinstance(value, int) and name not in _COUNTERS and name not in _GAUGES:
            if name.startswith("dropped_"):
                dropped.add_metric([name.removeprefix("dropped_")], value)
            else:
                counts.add_metric([name], value)
    yield dropped
    yield counts
    for name, text in _GAUGES.items():
        if name in stats:
            yield GaugeMetricFamily(f"zbus_{name}", text, value=stats[name])
    yield GaugeMetricFamily("zbus_queue_events", "Events that wait in memory for readers", stats["queues"]["events"])
    yield GaugeMetricFamily("zbus_queue_events_max", "The longest queue of a reader", stats["queues"]["events_max"])
    if "log" in stats:
        yield GaugeMetricFamily("zbus_log_head", "The offset of the last stored event", stats["log"]["head"])
        yield GaugeMetricFamily("zbus_log_bytes", "Size of the log and its write-ahead log", stats["log"]["bytes"])
        lag = GaugeMetricFamily("zbus_cursor_lag_events", "How far a durable name is behind", labels=["cursor"])
        for name, behind in list(stats["cursors"].items())[:LABELS_MAX]:
            lag.add_metric([name], behind)
        yield lag
    if "latency" in stats:
        text = "From handing a burst to the log until it is durable"
        yield _histogram("zbus_commit_seconds", text, stats["latency"]["commit"])
        text = "From publishing an event until it is in the queues of its readers"
        yield _histogram("zbus_end_to_end_seconds", text, stats["latency"]["end_to_end"])
    yield from _links(stats.get("links", {}))
    yield from _caches(stats.get("caches", {}))


_GAUGES = {
    "subscribers": "Subscriptions that are open",
    "readers_behind": "Subscriptions that read from the log rather than live",
    "nodes": "Nodes that are there, this one included",
    "gaps_open": "Holes that are still asked for, after a while without an answer",
}


def _histogram(name: str, text: str, of: dict[str, Any]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    below, buckets = 0, []
    for bound, number in zip((*BOUNDS_US, None), of["buckets"], strict=True):
        below += number
        buckets.append(("+Inf" if bound is None else str(bound / 1e6), below))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=of["sum_us"] / 1e6)


def _links(links: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    sent = CounterMetricFamily("zbus_sent", "Events handed to a transport", labels=["transport"])
    received = CounterMetricFamily("zbus_received", "Events that a transport brought", labels=["transport"])
    waiting = GaugeMetricFamily("zbus_send_queue_events", "Events that wait for a transport", labels=["transport"])
    for label, link in list(links.items())[:LABELS_MAX]:
        sent.add_metric([label], link["sent"])
        received.add_metric([label], link["received"])
        waiting.add_metric([label], link["waiting"])
    yield from (sent, received, waiting)


def _caches(caches: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    if not caches:
        return
    entries = GaugeMetricFamily("zbus_cache_entries", "Entries of a cache", labels=["cache"])
    for name, cache in list(caches.items())[:LABELS_MAX]:
        entries.add_metric([name], cache["entries"])
    yield entries
    for figure in _CACHE:
        counter = CounterMetricFamily(
            f"zbus_cache_{figure}", f"Of a cache: {figure.replace('_', ' ')}", labels=["cache"]
        )
        for name, cache in list(caches.items())[:LABELS_MAX]:
            counter.add_metric([name], cache[figure])
        yield counter


def _bridge(stats: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["bridge", "direction"]
    crossed = CounterMetricFamily("zbus_bridge_crossed", "Events that crossed a bridge", labels=labels)
    lag = GaugeMetricFamily("zbus_bridge_lag_seconds", "How old events are when they cross", labels=labels)
    linked = GaugeMetricFamily("zbus_bridge_linked", "Whether the far side is there", labels=labels)
    for way in ("forward", "reverse"):
        if way in stats:
            names = [stats["bridge"], way]
            crossed.add_metric(names, stats[way]["forwarded"])
            lag.add_metric(names, stats[way]["lag_ms"] / 1000)
            linked.add_metric(names, int(stats[way]["linked"]))
    yield from (crossed, lag, linked)
