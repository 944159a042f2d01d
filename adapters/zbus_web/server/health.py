"""`GET /healthz` for whoever watches the process, and `GET /metrics` for Prometheus."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import zbus
import zbus.metrics
from zbus.introspection import of
from zbus_web.access.authenticator import Authenticator
from zbus_web.http.settings import WebSettings
from zbus_web.introspect.web_metrics import WebMetrics


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator, figures: WebMetrics) -> list[BaseRoute]:
    """Both routes."""
    registry = CollectorRegistry()
    registry.register(zbus.metrics.collector(bus))
    registry.register(figures)

    async def metrics(request: Request) -> Response:
        access.grant(request).check_overview()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def health(request: Request) -> Response:
        """Without a token: it tells that the server answers, and how far its log is."""
        if not of(bus).is_open:
            raise zbus.BusClosed("answer")
        return Response(msgspec.json.encode({"status": "ok", "head": of(bus).head}), media_type="application/json")

    return [Route("/metrics", metrics, methods=["GET"]), Route("/healthz", health, methods=["GET"])]
