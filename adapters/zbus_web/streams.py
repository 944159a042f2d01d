"""What stays open: feeds of server-sent events, kept alive together and ended together.

sse-starlette's response runs four tasks and a task group for each client, with a cancel scope around each send: 25 KB
and 30 µs more than this. Of it we keep the headers and the encoding of named events; sending is done by
the request's own task, and one small task waits for the client to leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Protocol

from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send


class Stream(Protocol):
    """What is sent to one client: chunks of frames, until it is told to end."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Whole frames, as they come."""

    def pulse(self) -> None:
        """Time to show that it is alive, if nothing was sent since the last time."""

    def end(self, reason: str | None) -> None:
        """End soon. With a reason the client is told of it; without one it is gone."""


class Streams:
    """All that are open. One timer for all: one for each would be set and cancelled at every burst."""

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._open: dict[Stream, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.ending: str | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(self, stream: Stream) -> None:
        """Keep one alive until it is removed."""
        self._open[stream] = None
        if self.ending is not None:
            stream.end(self.ending)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._keepalive_s, self._pulse)

    def remove(self, stream: Stream) -> None:
        """It has ended."""
        self._open.pop(stream, None)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self, reason: str) -> None:
        """End all of them, and those that are still to come."""
        self.ending = reason
        for stream in list(self._open):
            stream.end(reason)

    def _pulse(self) -> None:
        for stream in list(self._open):
            stream.pulse()
        self._timer = asyncio.get_running_loop().call_later(self._keepalive_s, self._pulse)


class StreamResponse(EventSourceResponse):
    """Sends a stream. Chunks are bytes already; the client's end of the connection is watched beside it."""

    def __init__(self, stream: Stream, streams: Streams) -> None:
        self._chunks = stream.chunks()
        super().__init__(self._chunks, ping=0)
        self._stream, self._streams = stream, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends, or the client is gone."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await self._chunks.aclose()  # type: ignore[attr-defined]
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        leaving = asyncio.get_running_loop().create_task(self._leave(receive))
        self._streams.add(self._stream)
        try:
            async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.remove(self._stream)
            leaving.cancel()
            await asyncio.wait((leaving,))

    async def _leave(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.end(None)
