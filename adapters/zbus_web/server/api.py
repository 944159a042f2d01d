"""`/api/…`: the state of the bus as JSON, and the few operations that an operator may perform."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import zbus
from zbus_web.access.authenticator import Authenticator, Permissions
from zbus_web.events.cursors import delete_cursor, reset_cursor
from zbus_web.http.http_errors import HttpError
from zbus_web.http.settings import WebSettings
from zbus_web.http.streams import StreamResponse
from zbus_web.introspect.live import LiveStatistics, LiveStream
from zbus_web.introspect.views import TOPICS_MAX, Views

LIMIT = 1000
RENAMED = {"records": "log-records", "subscribers": "subscriptions"}  # retired paths, each with its replacement
_encode = msgspec.json.Encoder().encode

View = Callable[[Permissions, Request], Awaitable[dict[str, Any]]]


class _Reset(msgspec.Struct, forbid_unknown_fields=True):
    offset: int


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator, live: LiveStatistics) -> list[BaseRoute]:
    """Return every route under /api."""
    views = live.views

    def route(name: str, view: View) -> Route:
        async def endpoint(request: Request) -> Response:
            return _json(await view(access.permissions(request), request))

        return Route(f"/api/{name}", endpoint, methods=["GET"])

    async def stream_live(request: Request) -> Response:
        permissions = access.permissions(request)
        permissions.check_overview()
        return StreamResponse(LiveStream(live, permissions, settings.retry_ms), request.app.state.streams)

    async def reset(request: Request) -> Response:
        access.permissions(request).check_operate()
        name: str = request.path_params["name"]
        return _json(await reset_cursor(bus, name, await _offset(request)))

    async def delete(request: Request) -> Response:
        access.permissions(request).check_operate()
        name: str = request.path_params["name"]
        await delete_cursor(bus, name)
        return _json({"deleted": name})

    return [
        *[route(name, view) for name, view in _views(views).items()],
        Route("/api/live", stream_live, methods=["GET"]),
        *[Route(f"/api/{old}", _renamed(old, new)) for old, new in RENAMED.items()],
        Route("/api/cursors/{name:path}/reset", reset, methods=["POST"]),
        Route("/api/cursors/{name:path}", delete, methods=["DELETE"]),
    ]


def _views(views: Views) -> dict[str, View]:
    """Return the view of each path."""

    async def topics(permissions: Permissions, request: Request) -> dict[str, Any]:
        await views.activity.follow()
        return {"topics": views.topics(permissions, _limit(request)), "other": views.other(permissions)}

    async def publishers(permissions: Permissions, request: Request) -> dict[str, Any]:
        await views.activity.follow()
        return {"publishers": views.publishers(permissions, _limit(request))}

    async def cursors(permissions: Permissions, request: Request) -> dict[str, Any]:
        return {"cursors": await views.cursors(permissions)}

    async def leases(permissions: Permissions, request: Request) -> dict[str, Any]:
        return {"leases": await views.leases(permissions)}

    async def asyncapi(permissions: Permissions, request: Request) -> dict[str, Any]:
        return views.asyncapi(permissions)

    def plain(name: str, view: Callable[[Permissions], Any]) -> View:
        async def endpoint(permissions: Permissions, request: Request) -> dict[str, Any]:
            return {name: view(permissions)}

        return endpoint

    simple = ("nodes", "buses", "subscriptions", "schemas", "stats")
    return {
        "topics": topics,
        "publishers": publishers,
        "cursors": cursors,
        "leases": leases,
        "asyncapi": asyncapi,
        "log-records": plain("log_records", views.log_records),
        **{name: plain(name, getattr(views, name)) for name in simple},
    }


def _renamed(old: str, new: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a retired path: an error that names the new path."""

    async def endpoint(request: Request) -> Response:
        raise HttpError(404, "not_found", f"/api/{old} was renamed: use /api/{new}")

    return endpoint


def _json(value: Any) -> Response:
    return Response(_encode(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def _limit(request: Request) -> int:
    text = request.query_params.get("limit") or str(LIMIT)
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or not 1 <= int(text) <= TOPICS_MAX:
        raise HttpError(400, "invalid_limit", f"limit: {text[:40]!r} must be a number from 1 to {TOPICS_MAX}")
    return int(text)


async def _offset(request: Request) -> int:
    try:
        return msgspec.json.decode(await request.body(), type=_Reset).offset
    except msgspec.MsgspecError as error:
        raise HttpError(400, "invalid_body", f'the body must look like {{"offset": 42}}: {error}') from None
