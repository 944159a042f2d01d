"""What every request has to pass before anything else looks at it: names, rates, places and sizes.

Outermost of all, so that what is refused here has cost nothing else. Every refusal is told as JSON with its reason,
and counted by it. No answer has a CORS header: pages of other origins read nothing here.
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

TOO_LARGE, TOO_OFTEN = 1009, 1008  # codes with which a WebSocket is closed
# Of a body that was refused so much is still read: who is cut off while sending does not get to read why.
DRAIN_BYTES, DRAIN_S = 32 * 1024 * 1024, 5.0
_LOOKED_AT = frozenset((b"host", b"origin", b"content-length", b"transfer-encoding"))


class Admission:
    """ASGI middleware. A client is who a token names, or else an address."""

    def __init__(self, app: ASGIApp, settings: WebSettings, access: Authenticator) -> None:
        self._app, self._access, self._settings = app, access, settings
        self._origins = Origins(settings)
        self._rates = Rates(settings.requests_per_s, settings.requests_burst)
        self._places: Counter[str] = Counter()
        self._taken = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            client, measured = self._admit(scope)
        except HttpError as refusal:
            await send_refusal(scope, send, refusal, receive if refusal.status == 413 else None)
            return
        self._places[client] += 1
        self._taken += 1
        try:
            if scope["type"] == "websocket":
                await self._app(scope, self._paced(scope, client, receive, send), send)
            elif measured:
                await self._measured(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            self._taken -= 1
            self._places[client] -= 1
            if not self._places[client]:
                del self._places[client]

    def _admit(self, scope: Scope) -> tuple[str, bool]:
        """The client, and whether its body has to be measured; raises `HttpError`."""
        found: dict[bytes, str] = {}
        for name, value in scope["headers"]:
            if name in _LOOKED_AT:  # two of a name are no browser's doing: as one text they are nobody's host or origin
                text = value.decode("latin-1")
                found[name] = f"{found[name]}, {text}" if name in found else text
        self._origins.check(found.get(b"host", ""), found.get(b"origin"))
        client = self._client(scope)
        if wait_s := self._rates.take(client):
            raise _busy(429, "rate_limited", f"{client} asks too often", wait_s)
        settings = self._settings
        if self._taken >= settings.connections_max:
            raise _busy(503, "connections_full", f"all {settings.connections_max} connections are in use", 1.0)
        if self._places[client] >= settings.connections_per_client_max:
            raise _busy(429, "client_connections_full", f"{client} has all of its connections in use", 1.0)
        declared = found.get(b"content-length", "0")
        if declared.isdecimal() and int(declared) > settings.body_bytes_max:
            raise self._too_large()
        return client, b"transfer-encoding" in found or not declared.isdecimal()

    def _client(self, scope: Scope) -> str:
        found = self._access.found(scope)  # whoever needs a grant will refuse; who guesses tokens counts by address
        if isinstance(found, Permissions) and found.name != "anonymous":
            return f"token {found.name}"
        address = scope.get("client")
        return _place(address[0]) if address else "unknown"

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run with a body that does not say how long it is: what is too long ends there, and is answered 413."""
        size, begun, refused = 0, False, False

        async def counted() -> Message:
            nonlocal size, refused
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._settings.body_bytes_max:
                    if not refused and not begun:
                        refused = True
                        await send_refusal(scope, send, self._too_large(), receive)
                    return {"type": "http.disconnect"}
            return message

        async def unless_refused(message: Message) -> None:
            nonlocal begun
            if not refused:
                begun = True
                await send(message)

        try:
            await self._app(scope, counted, unless_refused)
        except Exception:
            if not refused:  # to the app it looks as if the client had gone, which it may complain of
                raise

    def _paced(self, scope: Scope, client: str, receive: Receive, send: Send) -> Receive:
        """Messages of a WebSocket are held to the same limits as requests."""

        async def paced() -> Message:
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
            count_refusal(scope, reason)
            await send({"type": "websocket.close", "code": code, "reason": reason})
            return {"type": "websocket.disconnect", "code": code}

        return paced

    def _too_large(self) -> HttpError:
        limit = self._settings.body_bytes_max
        reason, now = f"the body is over the limit of {limit:,} bytes", "Nothing was stored. Send less at a time"
        return HttpError(413, "body_too_large", reason, now, {"Connection": "close"})


async def send_refusal(scope: Scope, send: Send, refusal: HttpError, drain: Receive | None = None) -> None:
    """Answer a request, or what would have become a WebSocket, with a refusal, and count it.

    With `drain` the rest of the body is read, within bounds, before the connection is closed.
    """
    count_refusal(scope, refusal.code)
    body = refusal.body()
    kind = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": TOO_OFTEN, "reason": refusal.code})
            return
        kind = "websocket.http"
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **refusal.headers}
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": f"{kind}.response.start", "status": refusal.status, "headers": raw})
    await send({"type": f"{kind}.response.body", "body": body, "more_body": drain is not None})
    if drain is not None:
        await _drained(drain)
        await send({"type": f"{kind}.response.body", "body": b""})


async def _drained(receive: Receive) -> None:
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while size < DRAIN_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def count_refusal(scope: Scope, code: str) -> None:
    """One more for the figures of the application, if it has some."""
    figures = getattr(getattr(scope.get("app"), "state", None), "figures", None)
    if figures is not None:
        figures.refused[code] += 1


def _busy(status: int, code: str, reason: str, wait_s: float) -> HttpError:
    after = str(max(1, math.ceil(wait_s)))
    return HttpError(status, code, reason, f"Nothing was done. Try again in {after} s", {"Retry-After": after})


@lru_cache(maxsize=10_000)
def _place(address: str) -> str:
    """Of IPv6 the network: who has one address there has all of them."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4 or parsed.is_loopback:
        return address
    if (mapped := parsed.ipv4_mapped) is not None:
        return str(mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
