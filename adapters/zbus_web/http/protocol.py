"""Connections, before there is a request: how long and how large its head may be, and how many there are.

uvicorn waits for ever for a head that does not end, and keeps all of it. Here it is refused, and so is what is no HTTP
at all, in the form of all refusals.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .http_errors import NOTHING_CHANGED, HttpError
from .settings import WebSettings

HEAD_BYTES_MAX = 64 * 1024
SPARE = 64  # connections over those that may ask: for their answers that there are too many


class HttpConnection(HttpToolsProtocol):
    """One connection. `limited` makes the class for some settings."""

    _connections_max: int
    _head_timeout_s: float

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head, self._head_bytes = True, 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._connections_max + SPARE:
            transport.abort()
            return
        self._late = self.loop.call_later(self._head_timeout_s, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._in_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; then see whether the head goes on for too long."""
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(431, "head_too_large", f"the head of the request is over {HEAD_BYTES_MAX:,} bytes")
            elif self._late is None:
                self._late = self.loop.call_later(self._head_timeout_s, self._too_late)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head = False
        self._in_time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Nothing is expected until the next one begins."""
        super().on_message_complete()
        self._in_head, self._head_bytes = False, 0

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for what it cannot parse; a whole request before it is answered first."""
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        self._refuse(400, "request_malformed", "this is not a request of HTTP/1.1")

    def _too_late(self) -> None:
        self._late = None
        if self._in_head and not self.transport.is_closing():
            self._refuse(408, "head_too_slow", f"no whole head of a request came in {self._head_timeout_s:g} s")

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: int, code: str, reason: str) -> None:
        body = HttpError(status, code, reason, NOTHING_CHANGED).body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(b"".join([STATUS_LINE[status], head, body]))
        self.transport.close()


def limited(settings: WebSettings) -> type[HttpConnection]:
    """The class of connections for these settings, as uvicorn takes it."""

    class Limited(HttpConnection):
        _connections_max = settings.connections_max
        _head_timeout_s = settings.head_timeout_s

    return Limited
