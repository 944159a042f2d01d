"""The feed `/api/live` of a server, read by a thread of its own: one JSON object a second, and again after an outage.

Only what the standard library has: looking at a server needs none of the libraries that serving does.
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

SILENCE_S = 30.0  # a server says something every second
RETRY_S = (0.5, 5.0)
CLOSE_S = 1.0  # the thread may be waiting for a connection, which nothing ends early
LINE_BYTES_MAX = 16 * 1024 * 1024

# Called on the feed's thread: with what came, with words where the connection was lost, or with what ends it.
Told = Callable[[dict[str, Any] | str | Exception], None]


class LiveFeed:
    """Calls `told` until it is closed. What cannot be reached at first is an error; later it is tried again."""

    def __init__(self, url: str, token: str | None, told: Told) -> None:
        self._url, self._token, self._told = check_url(url), token, told
        self._closed = threading.Event()
        self._connection: HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run, name="zbus-top-feed", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading, at once."""
        self._closed.set()
        connection = self._connection
        if connection is not None and (socket := connection.sock) is not None:
            with suppress(OSError):
                socket.shutdown(2)  # wakes the thread, which may be waiting for the next second
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        reached, pauses = False, Backoff(*RETRY_S)
        while not self._closed.is_set():
            try:
                for found in self._frames():
                    reached = True
                    pauses.reset()
                    self._told(found)
                reason = "the server ended the feed"
            except ConfigInvalid as error:
                self._end(error)
                return
            except (OSError, HTTPException, ValueError) as error:
                reason = str(error) or type(error).__name__
                if not reached:
                    self._end(TransportError(f"{self._url} cannot be reached: {reason}"))
                    return
            if not self._closed.is_set():
                self._told(f"connecting again: {reason}")
                self._closed.wait(pauses.next())

    def _end(self, error: Exception) -> None:
        if not self._closed.is_set():
            self._told(error)

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
    """Return an address that can be asked, or raise `ConfigInvalid` with the reason.

    >>> check_url("http://127.0.0.1:7480")
    'http://127.0.0.1:7480'
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise ConfigInvalid("url", "it is written like http://127.0.0.1:7480")
    return url


def _check(response: HTTPResponse) -> None:
    if response.status == 200 and response.headers.get_content_type() == "text/event-stream":
        return
    body = response.read(64 * 1024)
    try:
        reason = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = "this is no server of zbus, or one without /api/live"
    field = "token" if response.status in (401, 403) else "url"
    raise ConfigInvalid(field, f"the server answered {response.status}: {reason}")


def _data_of(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of server-sent events, whatever else there is on the way."""
    data = b""
    while line := response.readline(LINE_BYTES_MAX):
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data += line[5:].strip()
        elif not line and data:
            found, data = json.loads(data), b""
            if isinstance(found, dict):
                yield found
