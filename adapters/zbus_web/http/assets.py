"""The console's files over HTTP, read once, with an ETag that saves the second download.

The page loads nothing from other servers, so it works without internet access. Keys, headers and payloads are
untrusted: the Content-Security-Policy lets the page run only our scripts, and makes Chromium reject text as markup.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from .http_errors import HttpError

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
    "Cache-Control": "no-cache",  # The browser revalidates each time and gets a 304, so it sees a new version at once.
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Asset:
    """One file of the console, ready to send."""

    content: bytes
    content_type: str
    etag: str


def routes() -> list[BaseRoute]:
    """Return the routes: `/` redirects to the console, `/console/…` serves its files.

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
    """Return the files by name. Only these names are served, so no path can leave the folder."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.name] = Asset(content, TYPES[path.suffix], etag)
    return found


async def _to_console(request: Request) -> Response:
    # Relative, so that it works behind a proxy that adds a prefix.
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


_MISSING = HttpError(404, "not_found", "the console has no such file", "Nothing was changed. See /console/").body()
