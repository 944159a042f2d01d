"""Support for the tests of the web: a server over a bus, a client of event streams, and `zbus serve` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import zbus
from zbus_web import WebSettings, serve

DEADLINE_S = float(os.environ.get("ZBUS_TEST_DEADLINE_S", "30"))
_TLS = httpx.create_ssl_context()  # Unused, but each client would create its own.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")}


@dataclass
class Web:
    """A bus, the server over it, and a client of it."""

    bus: zbus.Bus
    url: str
    client: httpx.AsyncClient

    async def publish(self, key: str, *payloads: bytes, **headers: str) -> list[int]:
        """Publish on the bus itself; returns the offsets."""
        publisher = await self.bus.publisher(key)
        return list(await publisher.publish_many(payloads, headers=headers or None))

    def stream(self, query: str = "", **headers: str) -> SseClient:
        return SseClient(self.url, f"/events{query}", headers)


@asynccontextmanager
async def web(log: Path | str, *, bus: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Web]:
    """Run a server on a free port of loopback."""
    async with zbus.open(log, **bus or {}) as opened:
        async with serve(opened, WebSettings(**{"port": 0} | settings)) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, verify=_TLS) as client:
                yield Web(opened, server.url, client)


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Frame:
    """One frame of an event stream, as a browser sees it. A frame without data only updates the last id."""

    id: int | None = None
    event: str = "message"
    data: Any = None
    retry: int | None = None
    comment: str | None = None


class SseClient:
    """Reads server-sent events from a socket with a small buffer, so that an idle client blocks the server."""

    def __init__(self, url: str, path: str, headers: dict[str, str]) -> None:
        self._address, self._path, self._headers = url.removeprefix("http://"), path, headers
        self.status, self.headers, self.last_id = 0, {}, None
        self._rest = b""

    async def __aenter__(self) -> SseClient:
        """Connect. If the response is a stream, the first frame shows that it is subscribed."""
        host, _, port = self._address.rpartition(":")
        async with asyncio.timeout(DEADLINE_S):
            # A small buffer, so that unread data stays at the server.
            self._reader, self._writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
            lines = [f"GET {self._path} HTTP/1.1", f"Host: {self._address}", *_lines(self._headers), "", ""]
            self._writer.write("\r\n".join(lines).encode())
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            self.status = int(head[0].split()[1])
            self.headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            self.first = await self.frame() if self.status == 200 else None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass

    async def frame(self) -> Frame | None:
        """Return the next frame of any kind, or None at the end."""
        async with asyncio.timeout(DEADLINE_S):
            while b"\n\n" not in self._rest:
                chunk = await self._chunk()
                if not chunk:
                    return None
                self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\n\n")
        frame = _parse(text.decode())
        if frame.id is not None:
            self.last_id = frame.id
        return frame

    async def event(self, name: str = "message") -> Any:
        """Return the data of the next event of this name. Keep-alives are skipped, and another name is an error."""
        while True:
            frame = await self.frame()
            assert frame is not None, "the stream ended"
            if frame.data is not None:
                assert frame.event == name, frame
                return frame.data

    async def offsets(self, number: int) -> list[int]:
        return [(await self.event())["offset"] for _ in range(number)]

    async def body(self) -> bytes:
        """Return the body of a response that is not a stream."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.readexactly(int(self.headers["content-length"]))

    async def _chunk(self) -> bytes:
        size = await self._reader.readline()
        if not size:
            return b""
        chunk = await self._reader.readexactly(int(size, 16) + 2)
        return chunk[:-2]


def _lines(headers: dict[str, str]) -> list[str]:
    return [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]


def _parse(text: str) -> Frame:
    frame = Frame()
    for line in text.split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            frame.id = int(value)
        elif name == "event":
            frame.event = value
        elif name == "data":
            frame.data = json.loads(value)
        elif name == "retry":
            frame.retry = int(value)
        elif name == "":
            frame.comment = value
        else:
            raise AssertionError(f"not a line of an event stream: {line!r}")
    return frame


def _enable_interrupts() -> None:
    """Restore SIGINT, which is ignored if the tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Served:
    """`zbus serve` in its own process. The constructor waits for the first line."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "zbus", "serve", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            env=ENVIRONMENT | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_enable_interrupts,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"zbus serve ended: {self.process.communicate()[1].decode()}")
        self.ready = json.loads(line)
        self.url: str = self.ready["url"]
        self.port = int(self.url.rpartition(":")[2])

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the process, as kill -9 does."""
        self.process.kill()
        self.process.communicate()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Stop the process with a signal. Return its exit code and stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors.decode()


def error_of(body: bytes | str) -> tuple[str, str]:
    """Check the form of an error body. Return its code and message."""
    error = json.loads(body)["error"]
    assert set(error) == {"code", "message", "state"}
    assert all(isinstance(text, str) and text for text in error.values())
    return error["code"], error["message"]


def numbered(first: int, number: int) -> Sequence[bytes]:
    return [b"%d" % each for each in range(first, first + number)]
