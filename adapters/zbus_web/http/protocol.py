"""Connection limits: the duration and size of a request head, and the number of connections.

uvicorn waits forever for a head that does not end, and buffers all of it. This protocol rejects such a head, and input
that is not HTTP, with the JSON body that every error has.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .http_errors import NOTHING_CHANGED, HttpError
from .settings import WebSettings

HEAD_BYTES_MAX = 64 * 1024
SPARE = 64  # Connections above the limit that are accepted, so that they get a 503 response.


class HttpConnection(HttpToolsProtocol):
    """One connection. `limited` returns the class for given settings."""

    _connections_max: int
    _head_timeout_s: float

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head, self._head_bytes = True, 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or abort it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._connections_max + SPARE:
            transport.abort()
            return
        self._late = self.loop.call_later(self._head_timeout_s, self._head_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer of the head."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, then check the size of the head."""
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._reject(431, "head_too_large", f"the request head is over the limit of {HEAD_BYTES_MAX:,} bytes")
            elif self._late is None:
                self._late = self.loop.call_later(self._head_timeout_s, self._head_timed_out)

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note that the head is complete."""
        self._in_head = False
        self._cancel_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that no head is expected until the next request begins."""
        super().on_message_complete()
        self._in_head, self._head_bytes = False, 0

    def send_400_response(self, msg: str) -> None:
        """Reject input that uvicorn cannot parse, after the response to a complete request before it."""
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        self._reject(400, "malformed_request", "this is not an HTTP/1.1 request")

    def _head_timed_out(self) -> None:
        self._late = None
        if self._in_head and not self.transport.is_closing():
            self._reject(408, "head_too_slow", f"the request head was not complete within {self._head_timeout_s:g} s")

    def _cancel_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _reject(self, status: int, code: str, message: str) -> None:
        body = HttpError(status, code, message, NOTHING_CHANGED).body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(b"".join([STATUS_LINE[status], head, body]))
        self.transport.close()


def limited(settings: WebSettings) -> type[HttpConnection]:
    """Return the connection class for these settings, in the form that uvicorn expects."""

    class Limited(HttpConnection):
        _connections_max = settings.connections_max
        _head_timeout_s = settings.head_timeout_s

    return Limited
