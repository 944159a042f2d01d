"""The ASGI application: every route over one bus. It does not own the bus: the caller opens and closes it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware

import zbus
from zbus_web.access.admission import Admission
from zbus_web.access.authenticator import Authenticator
from zbus_web.events import event_stream, publish
from zbus_web.graphql import endpoint as graph
from zbus_web.http import assets
from zbus_web.http.http_errors import HANDLERS
from zbus_web.http.settings import WebSettings, check_settings
from zbus_web.http.streams import Streams
from zbus_web.introspect import pages
from zbus_web.introspect.activity import Activity
from zbus_web.introspect.live import LiveStatistics
from zbus_web.introspect.views import Views
from zbus_web.introspect.web_metrics import RequestCounter, WebMetrics

from . import api, health


def create_app(bus: zbus.Bus, settings: WebSettings | None = None) -> Starlette:
    """Return an ASGI application for an open bus. It must run on the event loop of the bus.

    async with zbus.open("app.db") as bus:
        app = create_app(bus)
    """
    settings = WebSettings() if settings is None else check_settings(settings)
    secret = bus.config.session_secret
    access = Authenticator(settings, secret.get_secret_value().encode() if secret is not None else None)
    activity = Activity(bus)
    live = LiveStatistics(Views(bus, activity))
    streams = Streams(settings.keepalive_s)
    metrics = WebMetrics(streams)
    app = Starlette(
        routes=[
            *publish.routes(bus, settings, access),  # Starlette takes the first route that matches.
            *event_stream.routes(bus, settings, access),
            *pages.routes(bus, settings, access),
            *health.routes(bus, settings, access, metrics),
            *api.routes(bus, settings, access, live),
            *graph.routes(bus, settings, access, live),
            *assets.routes(),
        ],
        middleware=[Middleware(RequestCounter, metrics), Middleware(Admission, settings=settings, access=access)],
        exception_handlers=dict(HANDLERS),
    )
    app.state.streams, app.state.metrics, app.state.access, app.state.live = streams, metrics, access, live
    return app
