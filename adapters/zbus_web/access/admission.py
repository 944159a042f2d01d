"""Request admission: host and origin checks, rate limits, connection limits and body size limits.

This is the outermost handler after the request counter, so a rejected request costs nothing else. Every rejection is
a JSON error, counted by its code. No response has a CORS header, so pages of other origins cannot read anything.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zbus_web.http.http_errors import HttpError
from zbus_web.http.rates import Rates

from .origins import Origins
from .permissions import Permissions

if TYPE_CHECKING:
    from zbus_web.http.settings import WebSettings

    from .authenticator import Authenticator

TOO_LARGE, TOO_OFTEN = 1009, 1008  # close codes of WebSocket
# Limits for reading the rest of a rejected body: a client that is cut off while it sends cannot read the response.
DRAIN_BYTES, DRAIN_S = 32 * 1024 * 1024, 5.0
_CHECKED_HEADERS = frozenset((b"host", b"origin", b"content-length", b"transfer-encoding"))


class Admission:
    """ASGI middleware. A client is identified by the name of its token, or else by its address."""

    def __init__(self, app: ASGIApp, settings: WebSettings, access: Authenticator) -> None:
        self._app, self._access, self._settings = app, access, settings
        self._origins = Origins(settings)
        self._rates = Rates(settings.requests_per_s, settings.requests_burst)
        self._open_by_client: Counter[str] = Counter()
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            client, measured = self._admit(scope)
        except HttpError as error:
            await send_error(scope, send, error, receive if error.status == 413 else None)
            return
        self._open_by_client[client] += 1
        self._open += 1
        try:
            if scope["type"] == "websocket":
                await self._app(scope, self._limit_messages(scope, client, receive, send), send)
            elif measured:
                await self._measured(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            self._open -= 1
            self._open_by_client[client] -= 1
            if not self._open_by_client[client]:
                del self._open_by_client[client]

    def _admit(self, scope: Scope) -> tuple[str, bool]:
        """Return the client, and whether its body must be measured. Raises `HttpError` if the request is rejected."""
        found: dict[bytes, str] = {}
        for name, value in scope["headers"]:
            if name in _CHECKED_HEADERS:  # Browsers send each once; joined, two never match a host or origin.
                text = value.decode("latin-1")
                found[name] = f"{found[name]}, {text}" if name in found else text
        self._origins.check(found.get(b"host", ""), found.get(b"origin"))
        client = self._client(scope)
        if wait_s := self._rates.take(client):
            raise _busy(429, "rate_limited", f"{client} sends too many requests", wait_s)
        settings = self._settings
        if self._open >= settings.connections_max:
            raise _busy(503, "connections_full", f"all {settings.connections_max} connections are in use", 1.0)
        if self._open_by_client[client] >= settings.connections_per_client_max:
            raise _busy(429, "client_connections_full", f"{client} has too many open connections", 1.0)
        declared = found.get(b"content-length", "0")
        if declared.isdecimal() and int(declared) > settings.body_bytes_max:
            raise self._too_large()
        return client, b"transfer-encoding" in found or not declared.isdecimal()

    def _client(self, scope: Scope) -> str:
        found = self._access.found(scope)  # A handler rejects an invalid token; guesses are limited by address.
        if isinstance(found, Permissions) and found.name != "anonymous":
            return f"token {found.name}"
        address = scope.get("client")
        return _network(address[0]) if address else "unknown"

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app with a body of unknown length. A body over the limit is cut off, and the response is 413."""
        size, begun, rejected = 0, False, False

        async def counted() -> Message:
            nonlocal size, rejected
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._settings.body_bytes_max:
                    if not rejected and not begun:
                        rejected = True
                        await send_error(scope, send, self._too_large(), receive)
                    return {"type": "http.disconnect"}
            return message

        async def unless_rejected(message: Message) -> None:
            nonlocal begun
            if not rejected:
                begun = True
                await send(message)

        try:
            await self._app(scope, counted, unless_rejected)
        except Exception:
            if not rejected:  # To the app the client seems to have disconnected, which may raise.
                raise

    def _limit_messages(self, scope: Scope, client: str, receive: Receive, send: Send) -> Receive:
        """Return a `receive` that applies the limits of requests to WebSocket messages."""

        async def limited() -> Message:
            message = await receive()
            if message["type"] != "websocket.receive":
                return message
            text = message.get("text")
            size = len(message.get("bytes") or b"") if text is None else len(text.encode("utf-8", "surrogatepass"))
            if size > self._settings.body_bytes_max:
                code, reason = TOO_LARGE, "body_too_large"
            elif self._rates.take(client):
                code, reason = TOO_OFTEN, "rate_limited"
            else:
                return message
            count_rejection(scope, reason)
            await send({"type": "websocket.close", "code": code, "reason": reason})
            return {"type": "websocket.disconnect", "code": code}

        return limited

    def _too_large(self) -> HttpError:
        limit = self._settings.body_bytes_max
        message, state = f"the body is over the limit of {limit:,} bytes", "Nothing was stored. Send smaller bodies"
        return HttpError(413, "body_too_large", message, state, {"Connection": "close"})


async def send_error(scope: Scope, send: Send, error: HttpError, drain: Receive | None = None) -> None:
    """Respond to a request, or to a WebSocket handshake, with an error, and count it.

    If `drain` is given, read the rest of the body, within limits, before the connection is closed.
    """
    count_rejection(scope, error.code)
    body = error.body()
    kind = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": TOO_OFTEN, "reason": error.code})
            return
        kind = "websocket.http"
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": f"{kind}.response.start", "status": error.status, "headers": raw})
    await send({"type": f"{kind}.response.body", "body": body, "more_body": drain is not None})
    if drain is not None:
        await _drain(drain)
        await send({"type": f"{kind}.response.body", "body": b""})


async def _drain(receive: Receive) -> None:
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while size < DRAIN_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def count_rejection(scope: Scope, code: str) -> None:
    """Count a rejection in the metrics of the application, if it has any."""
    metrics = getattr(getattr(scope.get("app"), "state", None), "metrics", None)
    if metrics is not None:
        metrics.rejected[code] += 1


def _busy(status: int, code: str, message: str, wait_s: float) -> HttpError:
    after = str(max(1, math.ceil(wait_s)))
    return HttpError(status, code, message, f"Nothing was done. Try again in {after} s", {"Retry-After": after})


@lru_cache(maxsize=10_000)
def _network(address: str) -> str:
    """Return the address, or for IPv6 its /64 network, because a client usually has all addresses in it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4 or parsed.is_loopback:
        return address
    if (mapped := parsed.ipv4_mapped) is not None:
        return str(mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
