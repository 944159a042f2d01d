"""`bus.request` and `@bus.serve`: a request to one of the nodes that serve a key, and one reply.

A request and its reply are encoded as events, in the same envelope. They are neither stored nor published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from zbus.errors import BusClosed, ConfigInvalid, HandlerFailed, NoResponders, RequestTimeout
from zbus.event import Event
from zbus.headers import decode_headers, encode_headers
from zbus.keys import check_key
from zbus.payload import encode_payload
from zbus.util.identities import Identities
from zbus.util.runtime import Runtime
from zbus.wire.envelope import decode, encode

from .network import Network
from .request_server import is_cancelling

Handler = Callable[[Event], Awaitable[Any]]


class Requests:
    """Sends and serves the requests of one bus. Lives on the loop."""

    def __init__(self, network: Network, payload_bytes_max: int, runtime: Runtime) -> None:
        self._network, self._payload_bytes_max, self._time_ns = network, payload_bytes_max, runtime.time_ns
        self._identities = Identities[None](1, runtime.randbits)  # one publisher for all requests and replies

    async def request(
        self, key: str, payload: Any, timeout_s: float, headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> Event:
        """Send a request and return the reply. A handler of this bus has precedence over those of other nodes.

        Raises `NoResponders`, `RequestTimeout`, `HandlerFailed` or `TransportError`.
        """
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= 86_400:
            raise ConfigInvalid("timeout", f"{timeout_s!r} must be a number of seconds above 0, and at most 86400")
        request = self._frame(check_key(key), payload, headers, correlation_id)
        own = self._network.request_server.handler(key)
        if own is not None:
            return decode(await _request_locally(key, own, request, timeout_s))
        if not self._network.links:
            raise NoResponders(key)
        replies = self._network.request_client.request(key, request, timeout_s)
        try:
            async for reply in replies:
                return decode(reply)
        finally:
            await replies.aclose()  # type: ignore[attr-defined]
        raise NoResponders(key)

    def serve(self, key: str, handler: Handler) -> asyncio.Future[Any]:
        """Serve `key` with a handler. The future completes when the transports have declared it."""

        async def respond(request: Event) -> bytes:
            result = await handler(request)
            return self._frame(key, b"" if result is None else result, None, None)

        if self._network.request_server.handler(key) is not None:
            raise ConfigInvalid("key", f"{key!r} already has a handler on this bus")
        self._network.check_requests_supported()
        self._network.request_server.handle(check_key(key), respond, decode)
        return self._network.declare_served()

    def _frame(self, key: str, payload: Any, headers: Mapping[str, str] | None, correlation_id: str | None) -> bytes:
        body, kind = encode_payload(payload, self._payload_bytes_max)
        encoded = decode_headers(encode_headers(headers, correlation_id, kind))
        return encode(Event(*self._identities.next(None), self._time_ns(), key, body, encoded))


async def _request_locally(
    key: str, handler: Callable[[bytes], Awaitable[bytes]], request: bytes, timeout_s: float
) -> bytes:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            try:
                return await handler(request)
            except (SystemExit, KeyboardInterrupt, BusClosed):
                raise
            except BaseException as error:
                if deadline.expired() or (isinstance(error, asyncio.CancelledError) and is_cancelling()):
                    raise
                raise HandlerFailed(key, type(error).__name__, str(error)) from error
    except TimeoutError:
        raise RequestTimeout(key, timeout_s) from None
