"""HTTP interface of a bus: event streams (SSE), publishing, pages of the log, metrics, introspection and the console.

async with zbus.open("app.db") as bus, zbus_web.serve(bus) as server:
    print(server.url)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .http.settings import TokenSettings, WebSettings
    from .server.app import create_app
    from .server.running import serve

__all__ = ["TokenSettings", "WebSettings", "create_app", "serve"]

_MODULES = {
    "TokenSettings": ".http.settings",
    "WebSettings": ".http.settings",
    "create_app": ".server.app",
    "serve": ".server.running",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because starlette, uvicorn and pydantic are slow to import."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)
