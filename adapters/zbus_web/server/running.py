"""A running server: uvicorn on the loop of the bus, stopped in bounded time with its feeds told of it."""

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
from zbus_web.http.settings import WebSettings

from .app import create_app

BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn, without its hands on our signals: who runs the bus decides when it ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun, self._told = asyncio.Event(), asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell that it listens, or that it could not."""
        try:
            await super().startup(sockets)
        finally:
            self.begun.set()

    async def main_loop(self) -> None:
        """Wait to be told to stop; once a second the date in answers moves on."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._told.wait()

    def stop(self) -> None:
        """Begin to stop."""
        self.should_exit = True
        self._told.set()


class Running:
    """Where a server listens."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    @property
    def url(self) -> str:
        """Such as http://127.0.0.1:7480."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@asynccontextmanager
async def serving(bus: zbus.Bus, settings: WebSettings | None = None) -> AsyncIterator[Running]:
    """Serve an open bus while the block runs; at its end feeds are told, and all is closed in `stop_timeout_s`.

    async with zbus.open("app.db") as bus, serving(bus, WebSettings(port=0)) as server:
        print(server.url)
    """
    settings = settings or WebSettings()
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
        app.state.streams.end("the server is stopping")
        server.stop()
        await asyncio.shield(task)
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # a client that does not read would keep it for ever
        listener.close()
        app.state.live.views.activity.close()


def uvicorn_config(app: Starlette, settings: WebSettings) -> uvicorn.Config:
    """How uvicorn runs here: with our limits, and without a log of addresses, as one may hold a token."""
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
    """The socket, bound and listening: an address that is taken is an error here, and not a line in a log."""
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
