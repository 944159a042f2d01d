"""A real server over a real log, and its clients, for tests of permissions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

import zbus
from zbus.session import sign_session_token
from zbus_web import WebSettings, serve

SECRET = "a secret of sessions, long enough"
WAIT_S = 30.0


@dataclass
class Site:
    """A server, its bus, and a client without a token."""

    bus: zbus.Bus
    url: str
    client: httpx.AsyncClient

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def socket_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/graphql"

    async def publish(self, key: str, *payloads: Any) -> list[int]:
        return list(await (await self.bus.publisher(key)).publish_many(payloads or [b"x"]))

    async def get(self, path: str, **options: Any) -> Any:
        response = await self.client.get(path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def query(self, query: str, **options: Any) -> httpx.Response:
        variables = options.pop("variables", None)
        return await self.client.post("/graphql", json={"query": query, "variables": variables}, **options)


def is_ticking() -> bool:
    """Return whether a server on this loop makes the snapshots of the live stream."""
    return any(task.get_name() == "zbus-web-live" for task in asyncio.all_tasks())


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def session_token(session: str, secret: str = SECRET, ttl_s: float = 600) -> str:
    return sign_session_token(secret.encode(), session, ttl_s)


@asynccontextmanager
async def served(path: Path, *, bus: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Site]:
    options = {"session_secret": SECRET, **(bus or {})}
    async with zbus.open(path, **options) as opened, serve(opened, WebSettings(port=0, **settings)) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=WAIT_S) as client:
            yield Site(opened, running.url, client)


@asynccontextmanager
async def frames(client: httpx.AsyncClient, path: str, **options: Any) -> AsyncIterator[AsyncIterator[dict[str, str]]]:
    """Open a stream of server-sent events and yield its frames, each as a dict of its fields."""
    async with client.stream("GET", path, **options) as response:
        assert response.status_code == 200, await response.aread()

        async def parsed() -> AsyncIterator[dict[str, str]]:
            fields: dict[str, str] = {}
            async for line in response.aiter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                else:
                    yield fields
                    fields = {}

        yield parsed()


async def next_data(frames: AsyncIterator[dict[str, str]]) -> Any:
    """Return the decoded data of the next frame that has data."""
    async with asyncio.timeout(WAIT_S):
        async for frame in frames:
            if "data" in frame:
                return json.loads(frame["data"])
    raise AssertionError("the stream ended")


@asynccontextmanager
async def graph_socket(site: Site, path: str = "", **options: Any) -> AsyncIterator[ClientConnection]:
    """Open a GraphQL WebSocket and finish its handshake."""
    url = site.socket_url + path
    async with connect(url, subprotocols=["graphql-transport-ws"], **options) as socket:  # type: ignore[list-item]
        await socket.send(json.dumps({"type": "connection_init"}))
        assert (await receive(socket))["type"] == "connection_ack"
        yield socket


async def subscribe(socket: ClientConnection, query: str, number: str = "1", **variables: Any) -> None:
    payload = {"query": query, "variables": variables}
    await socket.send(json.dumps({"id": number, "type": "subscribe", "payload": payload}))


async def receive(socket: ClientConnection) -> Any:
    async with asyncio.timeout(WAIT_S):
        return json.loads(await socket.recv())


def errors_of(message: Any) -> list[dict[str, Any]]:
    """Return the errors of a message."""
    payload = message.get("payload") or {}
    errors: list[dict[str, Any]] = payload if message["type"] == "error" else payload.get("errors") or []
    return errors


async def until(check: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until a check returns a true value, and return it."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await check()):
            await asyncio.sleep(0.02)
        return found
