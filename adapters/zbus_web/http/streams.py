"""What stays open: feeds of server-sent events, kept alive together and ended together.

sse-starlette's response runs four tasks in a task group for each client, and a cancel scope around each send: 1,000
clients with a queue each took 46 MB that way, and take 24 MB with a whole subscription each this way. Of it we keep
the headers and the encoding of named events; the request's own task sends, and one small task waits for the client to
leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send


class Stream(Protocol):
    """What is sent to one client: chunks of frames, until it is told to end."""

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Whole frames, as they come."""

    def pulse(self) -> None:
        """Time to show that it is alive, if nothing was sent since the last time."""

    async def aclose(self) -> None:
        """Let go of what it holds; also of a stream that was never begun."""

    def end(self, reason: str | None) -> None:
        """End soon. With a reason the client is told of it; without one it is gone."""


class Streams:
    """All that are open. One timer for all: one for each would be set and cancelled at every burst."""

    def __init__(self, keepalive_s: float) -> None:
        # Who was silent from one pulse to the next speaks: nobody is silent for longer than `keepalive_s`.
        self._pulse_s = keepalive_s / 2
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
            self._timer = asyncio.get_running_loop().call_later(self._pulse_s, self._pulse)

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
        self._timer = asyncio.get_running_loop().call_later(self._pulse_s, self._pulse)


class StreamResponse(EventSourceResponse):
    """Sends a stream. Chunks are bytes already; the client's end of the connection is watched beside it."""

    def __init__(self, stream: Stream, streams: Streams) -> None:
        self._chunks = stream.chunks()
        super().__init__(self._chunks, ping=0)
        self._stream, self._streams = stream, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends, or the client is gone."""
        leaving = asyncio.get_running_loop().create_task(self._leave(receive))
        self._streams.add(self._stream)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.remove(self._stream)
            leaving.cancel()
            await self._chunks.aclose()
            await self._stream.aclose()

    async def _leave(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.end(None)
