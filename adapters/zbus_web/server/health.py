"""`GET /healthz` for liveness checks, and `GET /metrics` for Prometheus."""

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


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator, web_metrics: WebMetrics) -> list[BaseRoute]:
    """Return both routes."""
    registry = CollectorRegistry()
    registry.register(zbus.metrics.collector(bus))
    registry.register(web_metrics)

    async def metrics(request: Request) -> Response:
        access.permissions(request).check_overview()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def health(request: Request) -> Response:
        """Report that the server responds, and the head of its log. Needs no token."""
        if not of(bus).is_open:
            raise zbus.BusClosed("report health")
        return Response(msgspec.json.encode({"status": "ok", "head": of(bus).head}), media_type="application/json")

    return [Route("/metrics", metrics, methods=["GET"]), Route("/healthz", health, methods=["GET"])]
