"""The application: every route over one bus. It does not own the bus; whoever opened it closes it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

import zbus

from . import feed, health, pages, publish
from .access import Access
from .figures import Counting, Figures
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
    app = Starlette(
        routes=[
            *feed.routes(bus, settings, access),
            *publish.routes(bus, settings, access),
            *pages.routes(bus, settings, access),
            *health.routes(bus, settings, access, figures),
            *_further(bus, settings, access),
        ],
        middleware=[Middleware(Counting, figures), *_guard(settings, access)],
        exception_handlers=dict(HANDLERS),
    )
    app.state.streams, app.state.figures, app.state.access = streams, figures, access
    return app


def _further(bus: zbus.Bus, settings: WebSettings, access: Access) -> Iterator[BaseRoute]:
    if find_spec("zbus_web.activity"):
        activity = _part("activity").Activity(bus)
        for name in ("api", "graph"):
            if find_spec(f"zbus_web.{name}"):
                yield from _part(name).routes(bus, settings, access, activity)
    if find_spec("zbus_web.assets"):
        yield from _part("assets").routes()


def _guard(settings: WebSettings, access: Access) -> Iterator[Middleware]:
    if find_spec("zbus_web.guard"):
        yield Middleware(_part("guard").Guard, settings=settings, access=access)


def _part(name: str) -> Any:
    return import_module(f"zbus_web.{name}")
