"""Metrics of the web server: open streams, requests by route and status, rejections by error code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from zbus_web.http.streams import Streams

ROUTES = frozenset(("events", "log", "metrics", "healthz", "api", "graphql", "console"))


class WebMetrics(Collector):
    """Counters, updated on the event loop. Label values are bounded: known first path segments, statuses and codes."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.requests: Counter[tuple[str, int]] = Counter()
        self.rejected: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        yield GaugeMetricFamily("zbus_web_streams", "Open streams of server-sent events", len(self._streams))
        requests = CounterMetricFamily(
            "zbus_web_requests", "Responses, by route and status", labels=["route", "status"]
        )
        for (route, status), number in self.requests.items():
            requests.add_metric([route, str(status)], number)
        rejected = CounterMetricFamily("zbus_web_rejected", "Rejected requests, by error code", labels=["reason"])
        for code, number in self.rejected.items():
            rejected.add_metric([code], number)
        yield from (requests, rejected)

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not collect."""
        return []


class RequestCounter:
    """ASGI middleware that counts each response when it starts."""

    def __init__(self, app: ASGIApp, metrics: WebMetrics) -> None:
        self._app, self._requests = app, metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, and count the status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        first = scope["path"][1:].partition("/")[0]
        route = first if first in ROUTES else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._requests[route, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)
