"""`/api/…`: what there is to see of the bus, as JSON, and the few things that an operator may change."""

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
_encode = msgspec.json.Encoder().encode

Shown = Callable[[Permissions, Request], Awaitable[dict[str, Any]]]


class _Reset(msgspec.Struct, forbid_unknown_fields=True):
    offset: int


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator, live: LiveStatistics) -> list[BaseRoute]:
    """Every route under /api."""
    views = live.views

    def shown(name: str, show: Shown) -> Route:
        async def endpoint(request: Request) -> Response:
            return _json(await show(access.grant(request), request))

        return Route(f"/api/{name}", endpoint, methods=["GET"])

    async def looking(request: Request) -> Response:
        grant = access.grant(request)
        grant.check_overview()
        return StreamResponse(LiveStream(live, grant, settings.retry_ms), request.app.state.streams)

    async def reset(request: Request) -> Response:
        access.grant(request).check_operate()
        name: str = request.path_params["name"]
        return _json(await reset_cursor(bus, name, await _offset(request)))

    async def delete(request: Request) -> Response:
        access.grant(request).check_operate()
        name: str = request.path_params["name"]
        await delete_cursor(bus, name)
        return _json({"deleted": name})

    return [
        *[shown(name, show) for name, show in _shown(views).items()],
        Route("/api/live", looking, methods=["GET"]),
        Route("/api/cursors/{name:path}/reset", reset, methods=["POST"]),
        Route("/api/cursors/{name:path}", delete, methods=["DELETE"]),
    ]


def _shown(views: Views) -> dict[str, Shown]:
    """What each path shows."""

    async def topics(grant: Permissions, request: Request) -> dict[str, Any]:
        await views.activity.follow()
        return {"topics": views.topics(grant, _limit(request)), "other": views.other(grant)}

    async def publishers(grant: Permissions, request: Request) -> dict[str, Any]:
        await views.activity.follow()
        return {"publishers": views.publishers(grant, _limit(request))}

    async def cursors(grant: Permissions, request: Request) -> dict[str, Any]:
        return {"cursors": await views.cursors(grant)}

    async def leases(grant: Permissions, request: Request) -> dict[str, Any]:
        return {"leases": await views.leases(grant)}

    async def asyncapi(grant: Permissions, request: Request) -> dict[str, Any]:
        return views.asyncapi(grant)

    def plain(name: str, show: Callable[[Permissions], Any]) -> Shown:
        async def found(grant: Permissions, request: Request) -> dict[str, Any]:
            return {name: show(grant)}

        return found

    simple = ("nodes", "buses", "subscribers", "schemas", "stats", "records")
    return {
        "topics": topics,
        "publishers": publishers,
        "cursors": cursors,
        "leases": leases,
        "asyncapi": asyncapi,
        **{name: plain(name, getattr(views, name)) for name in simple},
    }


def _json(value: Any) -> Response:
    return Response(_encode(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def _limit(request: Request) -> int:
    text = request.query_params.get("limit") or str(LIMIT)
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or not 1 <= int(text) <= TOPICS_MAX:
        raise HttpError(400, "limit_invalid", f"limit: {text[:40]!r} is not a number from 1 to {TOPICS_MAX}")
    return int(text)


async def _offset(request: Request) -> int:
    try:
        return msgspec.json.decode(await request.body(), type=_Reset).offset
    except msgspec.MsgspecError as error:
        raise HttpError(400, "body_invalid", f'the body is like {{"offset": 42}}: {error}') from None
