"""The console's files over HTTP: read once, with a hash that spares the second download.

All that the page needs comes from here, so it works without internet access. Keys, headers and payloads are written
by strangers: the policy lets the page run our scripts only, and has Chromium refuse text as markup altogether.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

__all__ = ["routes"]

FOLDER = Path(__file__).parents[1] / "console"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "Cache-Control": "no-cache",  # asks each time, and is told 304: a new version is seen at once
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Asset:
    """One file of the console, as it is sent."""

    content: bytes
    content_type: str
    etag: str


def routes() -> list[BaseRoute]:
    """`/` leads to the console, `/console/…` are its files.

    >>> [route.path for route in routes()]
    ['/', '/console', '/console/', '/console/{name}']
    """
    return [
        Route("/", _to_console),
        Route("/console", _to_console),
        Route("/console/", _asset),
        Route("/console/{name}", _asset),
    ]


@cache
def assets() -> dict[str, Asset]:
    """The files by name. Nothing else can be asked for, so no path leads out of the folder."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.name] = Asset(content, TYPES[path.suffix], etag)
    return found


async def _to_console(request: Request) -> Response:
    # Relative, so that it also holds behind a proxy that adds a prefix.
    return RedirectResponse("console/" if request.url.path.endswith("/") else "./console/", 302, HEADERS)


async def _asset(request: Request) -> Response:
    name = request.path_params.get("name", INDEX)
    asset = assets().get(name)
    if asset is None:
        return Response(_MISSING, 404, HEADERS, "application/json")
    headers = HEADERS | {"ETag": asset.etag}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    return Response(asset.content, 200, headers | {"Content-Type": asset.content_type})


_MISSING = (
    b'{"error":{"code":"not_found","reason":"the console has no such file","now":"nothing was changed; see /console/"}}'
)
