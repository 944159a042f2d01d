"""Prometheus metrics of a bus or a bridge.

    from prometheus_client import REGISTRY
    REGISTRY.register(zbus.metrics.collector(bus))

Each scrape reads `stats()`; nothing is computed between scrapes. This is the only module that imports
prometheus-client. Labels are names of transports, durable subscriptions, bridges, caches and codes, of which there are
few; never a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .bridge.bridge import Bridge
from .errors import ConfigInvalid
from .observe.histogram import BOUNDS_US

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import Collector

    from . import blocking
    from .bus import Bus

INSTALL = "pip install 'zbus-mesh[metrics]'"
LABELS_MAX = 100  # values of one label; further values are left out


class MetricInfo(NamedTuple):
    """The type, the help text and the labels of one metric. A counter's name gets the suffix `_total`."""

    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, MetricInfo] = {
    "zbus_events_published": MetricInfo("counter", "Events published here and stored; without a log, handed on"),
    "zbus_events_delivered": MetricInfo("counter", "Events put into subscription queues, once per subscription"),
    "zbus_events_redelivered": MetricInfo("counter", "Events handed to a handler again after it failed"),
    "zbus_events_dropped": MetricInfo("counter", "Dropped events by code", ("reason",)),
    "zbus_gaps": MetricInfo("counter", "Gaps found in the events of other nodes"),
    "zbus_gaps_repaired": MetricInfo("counter", "Gaps repaired from a log"),
    "zbus_gaps_unrepaired": MetricInfo("counter", "Gaps that could not be repaired"),
    "zbus_events_repaired": MetricInfo("counter", "Events fetched from the logs of other nodes"),
    "zbus_duplicates_received": MetricInfo("counter", "Events received again and recognized by their identity"),
    "zbus_publish_blocked": MetricInfo("counter", "Times that backpressure began to block publishers"),
    "zbus_internal": MetricInfo("counter", "Other counters of stats() by name; names may change", ("name",)),
    "zbus_subscriptions": MetricInfo("gauge", "Open subscriptions"),
    "zbus_subscriptions_catching_up": MetricInfo("gauge", "Open subscriptions that read from the log, not live"),
    "zbus_nodes": MetricInfo("gauge", "Nodes that are alive, including this one"),
    "zbus_gaps_open": MetricInfo("gauge", "Gaps still being requested after the first attempts failed"),
    "zbus_subscription_queue_events": MetricInfo("gauge", "Events queued in memory for all subscriptions"),
    "zbus_subscription_queue_largest_events": MetricInfo("gauge", "Events in the longest subscription queue"),
    "zbus_log_head": MetricInfo("gauge", "Offset of the last stored event that was delivered here"),
    "zbus_log_bytes": MetricInfo("gauge", "Size of the log file and its write-ahead log"),
    "zbus_cursor_lag_events": MetricInfo("gauge", "Events after the cursor of a durable subscription", ("cursor",)),
    "zbus_commit_duration_seconds": MetricInfo("histogram", "Time from handing a batch to the log until it is durable"),
    "zbus_delivery_latency_seconds": MetricInfo(
        "histogram", "Time from publishing an event until it is in the queues of its subscriptions"
    ),
    "zbus_transport_sent": MetricInfo("counter", "Events handed to a transport", ("transport",)),
    "zbus_transport_received": MetricInfo("counter", "Events received from a transport", ("transport",)),
    "zbus_send_queue_events": MetricInfo("gauge", "Events that wait for a transport", ("transport",)),
    "zbus_cache_entries": MetricInfo("gauge", "Entries of a cache", ("cache",)),
    "zbus_cache_hits": MetricInfo("counter", "Lookups that found an entry", ("cache",)),
    "zbus_cache_misses": MetricInfo("counter", "Lookups that found no entry", ("cache",)),
    "zbus_cache_loads": MetricInfo("counter", "Calls of a loader", ("cache",)),
    "zbus_cache_load_errors": MetricInfo("counter", "Calls of a loader that failed", ("cache",)),
    "zbus_cache_invalidations": MetricInfo("counter", "Events that matched an invalidation rule", ("cache",)),
    "zbus_cache_evictions": MetricInfo("counter", "Entries removed because of size or age", ("cache",)),
    "zbus_bridge_forwarded": MetricInfo("counter", "Events that a bridge forwarded", ("bridge", "direction")),
    "zbus_bridge_lag_seconds": MetricInfo(
        "gauge", "Age of events when a bridge forwards them", ("bridge", "direction")
    ),
    "zbus_bridge_connected": MetricInfo("gauge", "1 if the target transport is connected", ("bridge", "direction")),
}

# Entries of `stats()` that have a metric of their own. Counters named `dropped_…` go to zbus_events_dropped, and every
# other number goes to zbus_internal.
_COUNTERS = {
    "published": "zbus_events_published",
    "delivered": "zbus_events_delivered",
    "redelivered": "zbus_events_redelivered",
    "gaps": "zbus_gaps",
    "gaps_repaired": "zbus_gaps_repaired",
    "gaps_unrepaired": "zbus_gaps_unrepaired",
    "events_repaired": "zbus_events_repaired",
    "duplicates_received": "zbus_duplicates_received",
    "publish_blocked": "zbus_publish_blocked",
}
_GAUGES = {
    "subscriptions": "zbus_subscriptions",
    "subscriptions_catching_up": "zbus_subscriptions_catching_up",
    "nodes": "zbus_nodes",
    "gaps_open": "zbus_gaps_open",
}
_CACHE = ("entries", "hits", "misses", "loads", "load_errors", "invalidations", "evictions")
Sample = tuple[list[str], float]  # the values of the labels, and the value


def collector(of: Bus | blocking.Bus | Bridge) -> Collector:
    """Return a collector for a bus or a bridge, for `prometheus_client.REGISTRY.register`.

    Raises `ConfigInvalid` with the command that installs prometheus-client if it is not installed.
    """
    try:
        from prometheus_client.registry import Collector as Base
    except ImportError as error:
        raise ConfigInvalid("metrics", f"prometheus_client is not installed: {INSTALL}") from error

    class MetricsCollector(Base):
        def collect(self) -> Iterator[Metric]:
            """Return the current metrics. A scrape calls this on any thread."""
            if isinstance(of, Bridge):
                yield from _bridge(of.stats())
            yield from _bus(of.node_stats() if isinstance(of, Bridge) else of.stats())

        def describe(self) -> list[Metric]:
            return []  # so that registering does not collect

    return MetricsCollector()


def _family(name: str, samples: Iterable[Sample]) -> Metric:
    """Return one counter or gauge with at most `LABELS_MAX` samples."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    info = METRICS[name]
    kind = CounterMetricFamily if info.type == "counter" else GaugeMetricFamily
    family = kind(name, info.help, labels=info.labels)
    for labels, value in list(samples)[:LABELS_MAX]:
        family.add_metric(labels, value)
    return family


def _histogram(name: str, of: dict[str, Any]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    below, buckets = 0, []
    for bound, number in zip((*BOUNDS_US, None), of["buckets"], strict=True):
        below += number
        buckets.append(("+Inf" if bound is None else str(bound / 1e6), below))
    return HistogramMetricFamily(name, METRICS[name].help, buckets=buckets, sum_value=of["sum_us"] / 1e6)


def _bus(stats: dict[str, Any]) -> Iterator[Metric]:
    for name, metric in _COUNTERS.items():
        yield _family(metric, [([], stats.get(name, 0))])
    others = {
        name: value
        for name, value in stats.items()
        if isinstance(value, int) and name not in _COUNTERS and name not in _GAUGES
    }
    dropped = {name: value for name, value in others.items() if name.startswith("dropped_")}
    yield _family("zbus_events_dropped", [([name.removeprefix("dropped_")], value) for name, value in dropped.items()])
    yield _family("zbus_internal", [([name], value) for name, value in others.items() if name not in dropped])
    for name, metric in _GAUGES.items():
        if name in stats:
            yield _family(metric, [([], stats[name])])
    yield _family("zbus_subscription_queue_events", [([], stats["queues"]["events"])])
    yield _family("zbus_subscription_queue_largest_events", [([], stats["queues"]["largest_events"])])
    if "log" in stats:
        yield _family("zbus_log_head", [([], stats["log"]["head"])])
        yield _family("zbus_log_bytes", [([], stats["log"]["bytes"])])
        yield _family("zbus_cursor_lag_events", [([name], lag) for name, lag in stats["cursors"].items()])
    if "latency" in stats:
        yield _histogram("zbus_commit_duration_seconds", stats["latency"]["commit"])
        yield _histogram("zbus_delivery_latency_seconds", stats["latency"]["delivery"])
    links = stats.get("links", {})
    yield _family("zbus_transport_sent", [([label], link["sent"]) for label, link in links.items()])
    yield _family("zbus_transport_received", [([label], link["received"]) for label, link in links.items()])
    yield _family("zbus_send_queue_events", [([label], link["waiting"]) for label, link in links.items()])
    if caches := stats.get("caches"):
        for name in _CACHE:
            yield _family(f"zbus_cache_{name}", [([cache], found[name]) for cache, found in caches.items()])


def _bridge(stats: dict[str, Any]) -> Iterator[Metric]:
    directions = {way: stats[way] for way in ("forward", "reverse") if way in stats}
    bridge = stats["bridge"]
    yield _family("zbus_bridge_forwarded", [([bridge, way], found["forwarded"]) for way, found in directions.items()])
    yield _family(
        "zbus_bridge_lag_seconds", [([bridge, way], found["lag_ms"] / 1e3) for way, found in directions.items()]
    )
    yield _family(
        "zbus_bridge_connected", [([bridge, way], int(found["connected"])) for way, found in directions.items()]
    )
