"""A running server: uvicorn on the event loop of the bus, stopped within a time limit, with its streams notified."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn
from starlette.applications import Starlette

import zbus
from zbus.errors import ConfigInvalid
from zbus_web.http.protocol import limited
from zbus_web.http.settings import WebSettings, check_settings
from zbus_web.http.streams import SERVER_STOPPING

from .app import create_app

BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the code that runs the bus decides when the server stops."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun, self._stopping = asyncio.Event(), asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen; set `begun` even if that fails."""
        try:
            await super().startup(sockets)
        finally:
            self.begun.set()

    async def main_loop(self) -> None:
        """Wait for `stop`, and update the Date header of responses once a second."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()

    def stop(self) -> None:
        """Start the shutdown."""
        self.should_exit = True
        self._stopping.set()


class Running:
    """The address of a running server."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    @property
    def url(self) -> str:
        """The base URL, such as http://127.0.0.1:7480."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@asynccontextmanager
async def serve(bus: zbus.Bus, settings: WebSettings | None = None) -> AsyncIterator[Running]:
    """Serve an open bus over HTTP while the block runs.

    At the end of the block, open streams receive an `end` event, and all connections are closed within
    `stop_timeout_s` seconds. Raises `ConfigInvalid` if the address is in use, or if other machines could reach the
    server without a token.

    async with zbus.open("app.db") as bus, serve(bus, WebSettings(port=0)) as server:
        print(server.url)
    """
    settings = WebSettings() if settings is None else check_settings(settings)
    settings.check_reachable()
    listener = listen(settings)
    try:
        app = create_app(bus, settings)
        server = _Server(uvicorn_config(app, settings))
        task = asyncio.get_running_loop().create_task(server.serve([listener]))
    except BaseException:
        listener.close()
        raise
    try:
        await server.begun.wait()
        if not server.started:
            await task
        yield Running(settings.host, listener.getsockname()[1])
    finally:
        app.state.streams.end(SERVER_STOPPING)
        server.stop()
        await asyncio.shield(task)
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # A client that does not read would keep the connection open forever.
        listener.close()
        app.state.live.views.activity.close()


def uvicorn_config(app: Starlette, settings: WebSettings) -> uvicorn.Config:
    """Return the configuration of uvicorn: our limits, and no access log, because a URL may contain a token."""
    return uvicorn.Config(
        app,
        http=limited(settings),
        ws="websockets-sansio",
        loop="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.stop_timeout_s)),
    )


def listen(settings: WebSettings) -> socket.socket:
    """Return a bound, listening socket. Raises `ConfigInvalid` if the address cannot be used."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigInvalid("port", f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    return listener
