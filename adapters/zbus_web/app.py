"""The application: every route over one bus. It does not own the bus; whoever opened it closes it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

import zbus

from . import api, feed, graph, health, pages, publish
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
    secret = getattr(bus.config, "session_secret", None)
    access = Access(settings, secret.get_secret_value().encode() if secret is not None else None)
    streams = Streams(settings.keepalive_s)
    figures = Figures(streams)
    activity = Activity(bus)
    app = Starlette(
        routes=[
            *feed.routes(bus, settings, access),
            *publish.routes(bus, settings, access),
            *pages.routes(bus, settings, access),
            *health.routes(bus, settings, access, figures),
            *api.routes(bus, settings, access, activity),
            *graph.routes(bus, settings, access, activity),
            *_console(),
        ],
        middleware=[Middleware(Counting, figures), Middleware(Guard, settings=settings, access=access)],
        exception_handlers=dict(HANDLERS),
    )
    app.state.streams, app.state.figures, app.state.access, app.state.activity = streams, figures, access, activity
    return app


def _console() -> Iterator[BaseRoute]:
    if find_spec("zbus_web.assets"):
        yield from import_module("zbus_web.assets").routes()
