"""A running server: uvicorn on the loop of the bus, stopped in bounded time with its feeds told of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

import zbus
from zbus.errors import ConfigInvalid

from .app import create_app
from .settings import WebSettings

BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn, without its hands on our signals: who runs the bus decides when it ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell that it listens."""
        await super().startup(sockets)
        self.listening.set()


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
    app = create_app(bus, settings)
    listener = _listen(settings)
    try:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="websockets-sansio",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,  # an address may hold a token
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(settings.stop_timeout_s)),
        )
        server = _Server(config)
        task = asyncio.get_running_loop().create_task(server.serve([listener]))
    except BaseException:
        listener.close()
        raise
    try:
        await server.listening.wait()
        yield Running(settings.host, listener.getsockname()[1])
    finally:
        app.state.streams.end("the server is stopping")
        server.should_exit = True
        await asyncio.shield(task)
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # a client that does not read would keep it for ever
        listener.close()


def _listen(settings: WebSettings) -> socket.socket:
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
