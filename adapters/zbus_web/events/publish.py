"""`POST /events/{key}`: publish the body as an event. The response is sent once the event is durable.

With an `Idempotency-Key`, the event's identity is derived from it and from the event's key. So the log itself detects
a repeated request, even after a restart: it keeps the first event, and the response has the offset of that event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from time import time_ns
from typing import Any

import msgspec
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import zbus
from zbus.deliver.log_reader import STALE_S
from zbus.errors import IdentityConflict
from zbus.event import Event
from zbus.headers import BAGGAGE, CONTENT_TYPE, JSON, TEXT, TRACEPARENT, TRACESTATE
from zbus.introspection import of
from zbus.keys import KeySet
from zbus.ports.log import Log, Page, Span
from zbus.publish.publisher import EventPublisher
from zbus.util.memo import Memo
from zbus_web.access.authenticator import Authenticator
from zbus_web.http.http_errors import NOTHING_STORED, HttpError
from zbus_web.http.settings import WebSettings

PUBLISHERS_MAX = 1024  # One for each key in use. An evicted publisher gets a new identity when its key is used again.
IDEMPOTENCY_KEY_MAX = 200
HEADER_PREFIX = b"x-zbus-header-"
_BINARY = "application/octet-stream"
_PLAIN = {f"{kind}{rest}": kind for kind in (JSON, TEXT) for rest in ("; charset=utf-8", ";charset=utf-8")}
_encode = msgspec.json.Encoder().encode


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator) -> list[BaseRoute]:
    """Return the route that publishes."""
    return [Route("/events/{key:path}", HttpPublishing(bus, settings, access), methods=["POST"])]


@dataclass(frozen=True, slots=True)
class Publication:
    """The event that a request publishes."""

    key: str
    payload: bytes
    headers: Mapping[str, str] | None
    idempotency_key: str | None


class HttpPublishing:
    """Publishing as an ASGI application: it runs for every event, and does half the work of a request handler."""

    def __init__(self, bus: zbus.Bus, settings: WebSettings, access: Authenticator) -> None:
        self._bus, self._settings, self._access = bus, settings, access
        self._publishers = Memo[str, EventPublisher](PUBLISHERS_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, store the event, and send the response."""
        key = scope["path_params"]["key"]
        self._access.permissions(HTTPConnection(scope)).check_publish(key)
        headers, idempotency_key, length = _read_headers(scope["headers"])
        payload = await _read_body(receive, length, self._settings.body_bytes_max)
        if payload is None:
            return  # The client disconnected before the end of the body: nothing is stored.
        status = 201
        if idempotency_key is None:
            result = await self._publish(Publication(key, payload, headers, None))
        else:
            result, first = await put_once(self._bus, Publication(key, payload, headers, idempotency_key))
            if not first:
                status, result = 200, {**result, "duplicate": True}
        body = _encode(result)
        response_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": response_headers})
        await send({"type": "http.response.body", "body": body})

    async def _publish(self, publication: Publication) -> dict[str, Any]:
        publishers, key = self._publishers, publication.key
        if key not in publishers:
            publishers.setdefault(key, await self._bus.publisher(key))
        offset = await publishers.use(key).publish(publication.payload, headers=publication.headers)
        return {"offset": int(offset), "publisher_id": str(offset.publisher_id), "sequence": offset.sequence}


async def put_once(bus: zbus.Bus, publication: Publication) -> tuple[dict[str, Any], bool]:
    """Store one event for each idempotency key, however often and however concurrently a request is repeated.

    Returns the body of the response, and whether this call stored the event. Raises `HttpError` if the key was used for
    a different event. If cancelled, the event may still be stored.
    """
    log = of(bus).reader.required("an Idempotency-Key")
    identity = _identity(publication)
    event = Event(identity, 0, time_ns(), publication.key, publication.payload, publication.headers or {})
    try:
        (offset,) = await bus.put(event)
    except IdentityConflict as error:
        raise _mismatch(publication, error.offset) from error
    if not offset.first:
        _check_same(publication, await _read(bus, log, offset))
    return {"offset": int(offset), "publisher_id": str(identity), "sequence": 0}, offset.first


async def _read(bus: zbus.Bus, log: Log, offset: int) -> Event:
    span = Span(log.before(offset), offset)
    if offset <= log.low_water():
        message = "the event was stored, and retention has removed it"
        raise HttpError(409, "idempotency_expired", message, "Nothing was stored. Use a new Idempotency-Key")
    page: Page = await of(bus).reader.run(log.read, KeySet.all(), span, 1)
    while page.covered < offset:  # the read is stale: the log has stored the event
        await asyncio.sleep(STALE_S)
        page = await of(bus).reader.run(log.read, KeySet.all(), span, 1)
    events, error, _ = page.events()
    if error is not None:
        raise error
    if not events:
        message = f"the event was stored at offset {offset}, and retention has removed it"
        raise HttpError(409, "idempotency_expired", message, "Nothing was stored. Use a new Idempotency-Key")
    return events[0]


def _check_same(publication: Publication, stored: Event) -> None:
    wanted = (publication.key, publication.payload, _without_context(publication.headers or {}))
    if (stored.key, stored.payload, _without_context(stored.headers)) != wanted:
        raise _mismatch(publication, stored.offset)


def _mismatch(publication: Publication, offset: int) -> HttpError:
    message = f"this Idempotency-Key was used for another event on {publication.key!r}, at offset {offset}"
    state = "Nothing was stored; the first event is safe. Use a new Idempotency-Key for a new event"
    return HttpError(422, "idempotency_mismatch", message, state)


def _without_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without the trace context, which differs each time a request is repeated."""
    return {name: value for name, value in headers.items() if name not in (TRACEPARENT, TRACESTATE, BAGGAGE)}


def _identity(publication: Publication) -> int:
    """Return the id of a publisher with one event: 63 bits derived from the idempotency key and the event's key."""
    text = f"{publication.key}\0{publication.idempotency_key}".encode(errors="surrogateescape")
    return int.from_bytes(blake2b(text, digest_size=8, person=b"zbus-idempotency").digest(), "big") >> 1


def _read_headers(raw: list[tuple[bytes, bytes]]) -> tuple[dict[str, str] | None, str | None, int]:
    """Return the event's headers, the idempotency key, and the declared length of the body, or 0."""
    headers: dict[str, str] = {}
    idempotency_key, length = None, 0
    for name, value in raw:
        if name == b"content-type":
            kind = value.decode("latin-1")
            if kind != _BINARY:
                headers[CONTENT_TYPE] = _PLAIN.get(kind.lower(), kind)
        elif name == b"content-encoding" and value != b"identity":
            message = "Content-Encoding is not supported: the body is stored as it is sent"
            raise HttpError(415, "unsupported_encoding", message, NOTHING_STORED)
        elif name == b"content-length":
            length = int(value)
        elif name == b"idempotency-key":
            idempotency_key = _read_idempotency_key(value)
        elif name.startswith(HEADER_PREFIX):
            headers[name[len(HEADER_PREFIX) :].decode("latin-1")] = _text(name, value)
    return headers or None, idempotency_key, length


def _read_idempotency_key(value: bytes) -> str:
    text = _text(b"idempotency-key", value)
    if not 0 < len(text) <= IDEMPOTENCY_KEY_MAX:
        message = f"Idempotency-Key has {len(text)} characters; it must have 1 to {IDEMPOTENCY_KEY_MAX}"
        raise HttpError(400, "invalid_idempotency_key", message, NOTHING_STORED)
    return text


def _text(name: bytes, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise HttpError(400, "invalid_header", f"{name.decode('latin-1')} is not UTF-8", NOTHING_STORED) from None


async def _read_body(receive: Receive, length: int, limit: int) -> bytes | None:
    """Return the whole body, or None if the client disconnected. Raises `HttpError` once it is over the limit."""
    if length > limit:
        raise _too_large(length, limit)
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False) and message["type"] == "http.request":
        if len(body) > limit:
            raise _too_large(len(body), limit)
        return body
    parts, size = [body], len(body)
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(size, limit)
    return b"".join(parts) if message["type"] == "http.request" else None


def _too_large(size: int, limit: int) -> HttpError:
    message = f"a body of {size:,} bytes or more is over the limit of {limit:,}"
    return HttpError(413, "body_too_large", message, NOTHING_STORED, {"connection": "close"})
