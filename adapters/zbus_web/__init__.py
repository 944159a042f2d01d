"""HTTP interface of a bus: event streams (SSE), publishing, pages of the log, metrics, introspection and the console.

async with zbus.open("app.db") as bus, zbus_web.serve(bus) as server:
    print(server.url)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zbus.util.lazy_names import lazy_names

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
# Starlette, uvicorn and pydantic are slow to import.
__getattr__ = lazy_names(__name__, _MODULES)
