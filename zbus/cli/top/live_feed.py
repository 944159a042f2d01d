"""Client of a server's event stream `/api/live`: one JSON object per second, read by its own thread.

It reconnects after an outage, and uses only the standard library, so that `zbus top --url` does not need the extra web.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from zbus.errors import ConfigInvalid, TransportError
from zbus.util.backoff import Backoff

SILENCE_S = 30.0  # a server sends an object every second
RETRY_S = (0.5, 5.0)
CLOSE_S = 1.0  # the thread may be in a connection attempt, which cannot be interrupted
LINE_BYTES_MAX = 16 * 1024 * 1024

# Called on the feed's thread with an object, with a reason if the connection was lost, or with the error that ends it.
Receive = Callable[[dict[str, Any] | str | Exception], None]


class LiveFeed:
    """Calls `receive` until it is closed. If the first connection fails, that is an error; later ones are retried."""

    def __init__(self, url: str, token: str | None, receive: Receive) -> None:
        self._url, self._token, self._receive = check_url(url), token, receive
        self._closed = threading.Event()
        self._connection: HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run, name="zbus-top-feed", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, within `CLOSE_S` seconds."""
        self._closed.set()
        connection = self._connection
        if connection is not None and (socket := connection.sock) is not None:
            with suppress(OSError):
                socket.shutdown(2)  # wakes the thread, which may be waiting for the next object
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        reached, pauses = False, Backoff(*RETRY_S)
        while not self._closed.is_set():
            try:
                for found in self._frames():
                    reached = True
                    pauses.reset()
                    self._receive(found)
                reason = "the server closed the stream"
            except ConfigInvalid as error:
                self._end(error)
                return
            except (OSError, HTTPException, ValueError) as error:
                reason = str(error) or type(error).__name__
                if not reached:
                    self._end(TransportError(f"{self._url} cannot be reached: {reason}"))
                    return
            if not self._closed.is_set():
                self._receive(f"reconnecting: {reason}")
                self._closed.wait(pauses.next())

    def _end(self, error: Exception) -> None:
        if not self._closed.is_set():
            self._receive(error)

    def _frames(self) -> Iterator[dict[str, Any]]:
        parts = urlsplit(self._url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = connection = kind(parts.netloc.rpartition("@")[2], timeout=SILENCE_S)
        try:
            headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token}"
            connection.request("GET", f"{parts.path.rstrip('/')}/api/live", headers=headers)
            response = connection.getresponse()
            _check(response)
            yield from _data_of(response)
        finally:
            connection.close()


def check_url(url: str) -> str:
    """Return the URL of a server. Raises `ConfigInvalid` if it is malformed.

    >>> check_url("http://127.0.0.1:7480")
    'http://127.0.0.1:7480'
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise ConfigInvalid("url", "must be a URL such as http://127.0.0.1:7480")
    return url


def _check(response: HTTPResponse) -> None:
    if response.status == 200 and response.headers.get_content_type() == "text/event-stream":
        return
    body = response.read(64 * 1024)
    try:
        reason = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = "not a zbus server, or one without /api/live"
    field = "token" if response.status in (401, 403) else "url"
    raise ConfigInvalid(field, f"the server answered {response.status}: {reason}")


def _data_of(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of server-sent events, and ignore everything else in the stream."""
    data = b""
    while line := response.readline(LINE_BYTES_MAX):
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data += line[5:].strip()
        elif not line and data:
            found, data = json.loads(data), b""
            if isinstance(found, dict):
                yield found
