"""The web server's own figures, beside those of the bus: feeds, requests by route and status, refusals by code."""

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
    """Counted on the loop. Labels are few: the first part of our own paths, statuses, and codes of refusals."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.requests: Counter[tuple[str, int]] = Counter()
        self.refused: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        """Called by a scrape."""
        yield GaugeMetricFamily("zbus_web_streams", "Feeds of server-sent events that are open", len(self._streams))
        requests = CounterMetricFamily(
            "zbus_web_requests", "Requests that were answered, by route and status", labels=["route", "status"]
        )
        for (route, status), number in self.requests.items():
            requests.add_metric([route, str(status)], number)
        refused = CounterMetricFamily("zbus_web_rejected", "Requests that were refused, by reason", labels=["reason"])
        for code, number in self.refused.items():
            refused.add_metric([code], number)
        yield from (requests, refused)

    def describe(self) -> list[Metric]:
        """Registering asks for no figures."""
        return []


class Counting:
    """ASGI middleware: counts each answer when it begins."""

    def __init__(self, app: ASGIApp, figures: WebMetrics) -> None:
        self._app, self._requests = app, figures.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, and look at the status."""
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
