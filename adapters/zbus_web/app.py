"""The application: every route over one bus. It does not own the bus; whoever opened it closes it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware

import zbus

from . import api, assets, feed, graph, health, pages, publish
from .access import Access
from .activity import Activity
from .figures import Counting, Figures
from .guard import Guard
from .refusals import HANDLERS
from .settings import WebSettings
from .streams import Streams


def create_app(bus: zbus.Bus, settings: WebSettings | None = None) -> Starlette:
    """An ASGI application for an open bus: it runs on the loop of the bus.

    async with zbus.open("app.db") as bus:
        app = create_app(bus)
    """
    settings = settings or WebSettings()
    secret = bus.config.session_secret
    access = Access(settings, secret.get_secret_value().encode() if secret is not None else None)
    activity = Activity(bus)
    streams = Streams(settings.keepalive_s)
    figures = Figures(streams)
    app = Starlette(
        routes=[
            *publish.routes(bus, settings, access),  # the first is found first
            *feed.routes(bus, settings, access),
            *pages.routes(bus, settings, access),
            *health.routes(bus, settings, access, figures),
            *api.routes(bus, settings, access, activity),
            *graph.routes(bus, settings, access, activity),
            *assets.routes(),
        ],
        middleware=[Middleware(Counting, figures), Middleware(Guard, settings=settings, access=access)],
        exception_handlers=dict(HANDLERS),
    )
    app.state.streams, app.state.figures, app.state.access, app.state.activity = streams, figures, access, activity
    return app
