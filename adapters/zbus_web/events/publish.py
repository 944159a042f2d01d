"""`POST /events/{key}`: the body becomes an event; the answer comes once it is on disk.

With an `Idempotency-Key` the event's identity is made from it and from the event's key. So the log itself knows a
request that is repeated, also after a restart: it keeps the first, and its offset is the answer again.
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
from zbus.event import Event
from zbus.headers import BAGGAGE, CONTENT_TYPE, JSON, TEXT, TRACEPARENT, TRACESTATE
from zbus.introspection import of
from zbus.keys import KeySet
from zbus.ports.log import Span
from zbus.publish.publisher import EventPublisher
from zbus.util.memo import Memo
from zbus_web.access.authenticator import Authenticator
from zbus_web.http.http_errors import NOTHING_STORED, HttpError
from zbus_web.http.settings import WebSettings

PUBLISHERS_MAX = 1024  # one for each key that is in use; who was not used for longest gets a new identity later
IDEMPOTENCY_KEY_MAX = 200
HEADER_PREFIX = b"x-zbus-header-"
_BINARY = "application/octet-stream"
_PLAIN = {f"{kind}{rest}": kind for kind in (JSON, TEXT) for rest in ("; charset=utf-8", ";charset=utf-8")}
_encode = msgspec.json.Encoder().encode


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator) -> list[BaseRoute]:
    """The route that publishes."""
    return [Route("/events/{key:path}", HttpPublishing(bus, settings, access), methods=["POST"])]


@dataclass(frozen=True, slots=True)
class _Given:
    """What a request asks to publish."""

    key: str
    payload: bytes
    headers: Mapping[str, str] | None
    idempotency_key: str | None


class HttpPublishing:
    """An ASGI application rather than a function of a request: it is called for every event, and does half as much."""

    def __init__(self, bus: zbus.Bus, settings: WebSettings, access: Authenticator) -> None:
        self._bus, self._settings, self._access = bus, settings, access
        self._publishers = Memo[str, EventPublisher](PUBLISHERS_MAX)
        self._once = IdempotentPublisher(bus)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, store the event, and answer."""
        key = scope["path_params"]["key"]
        self._access.grant(HTTPConnection(scope)).check_publish(key)
        headers, idempotency_key, length = _read_headers(scope["headers"])
        payload = await _read_body(receive, length, self._settings.body_bytes_max)
        if payload is None:
            return  # the client went away before it had said everything: nothing is stored
        status = 201
        if idempotency_key is None:
            answer = await self._publish(_Given(key, payload, headers, None))
        else:
            answer, first = await self._once.put(_Given(key, payload, headers, idempotency_key))
            if not first:
                status, answer = 200, {**answer, "repeated": True}
        body = _encode(answer)
        told = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": told})
        await send({"type": "http.response.body", "body": body})

    async def _publish(self, given: _Given) -> dict[str, Any]:
        bus, publishers = self._bus, self._publishers
        publisher = publishers.pop(given.key, None)
        if publisher is None:
            publisher = await bus.publisher(given.key)
            publisher = publishers.pop(given.key, publisher)
        publishers[given.key] = publisher
        offset = await publisher.publish(given.payload, headers=given.headers)
        return {"offset": int(offset), "publisher_id": str(offset.publisher_id), "sequence": offset.sequence}


class IdempotentPublisher:
    """Puts an event once for each idempotency key, whoever repeats it and when."""

    def __init__(self, bus: zbus.Bus) -> None:
        self._bus = bus
        self._under_way: dict[int, asyncio.Task[tuple[Event, bool]]] = {}

    async def put(self, given: _Given) -> tuple[dict[str, Any], bool]:
        """The answer, and whether this was the first time. Raises a `HttpError` where the first had another body."""
        if of(self._bus).reader.log is None:
            raise zbus.LogRequired("an Idempotency-Key")
        identity = _identity(given)
        while (others := self._under_way.get(identity)) is not None:
            await asyncio.wait((others,))  # it is stored then, or failed: look again
        task = asyncio.get_running_loop().create_task(self._store(given, identity))
        self._under_way[identity] = task
        task.add_done_callback(lambda done: self._done(identity, done))
        event, first = await asyncio.shield(task)
        if not first and (event.key, event.payload, _without_context(event.headers)) != (
            given.key,
            given.payload,
            _without_context(given.headers or {}),
        ):
            reason = f"this Idempotency-Key was used for another event on {given.key!r}, at offset {event.offset}"
            now = "Nothing was stored; the first event is safe. Use another Idempotency-Key for another event"
            raise HttpError(422, "idempotency_mismatch", reason, now)
        return {"offset": event.offset, "publisher_id": str(identity), "sequence": 0}, first

    async def _store(self, given: _Given, identity: int) -> tuple[Event, bool]:
        bus, inside = self._bus, of(self._bus)
        event = Event(identity, 0, time_ns(), given.key, given.payload, given.headers or {})
        (offset,) = await bus.put(event)
        if offset.first:
            return msgspec.structs.replace(event, offset=int(offset)), True
        log = inside.reader.required("an Idempotency-Key")
        page = await inside.reader.run(log.read, KeySet.all(), Span(log.before(offset), offset), 1)
        events, error, _ = page.events()
        if error is not None:
            raise error
        if not events:
            raise HttpError(
                409, "idempotency_expired", f"it was stored at offset {offset}, which retention removed", _KEPT
            )
        return events[0], False

    def _done(self, identity: int, task: asyncio.Task[tuple[Event, bool]]) -> None:
        del self._under_way[identity]
        if not task.cancelled():
            task.exception()  # whoever asked has it; nobody may be left to


_KEPT = "Nothing was stored. Use another Idempotency-Key"


def _without_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that make an event what it is. Each repetition of a request has a trace context of its own."""
    return {name: value for name, value in headers.items() if name not in (TRACEPARENT, TRACESTATE, BAGGAGE)}


def _identity(given: _Given) -> int:
    """A publisher that published this one event: 63 bits that follow from the idempotency key and the event's key."""
    text = f"{given.key}\0{given.idempotency_key}".encode(errors="surrogateescape")
    return int.from_bytes(blake2b(text, digest_size=8, person=b"zbus-idempotency").digest(), "big") >> 1


def _read_headers(raw: list[tuple[bytes, bytes]]) -> tuple[dict[str, str] | None, str | None, int]:
    """The event's headers, the idempotency key, and the length of the body where it is told."""
    headers: dict[str, str] = {}
    idempotency_key, length = None, 0
    for name, value in raw:
        if name == b"content-type":
            kind = value.decode("latin-1")
            if kind != _BINARY:
                headers[CONTENT_TYPE] = _PLAIN.get(kind.lower(), kind)
        elif name == b"content-encoding" and value != b"identity":
            reason = "a body is stored as it is sent: send it without Content-Encoding"
            raise HttpError(415, "encoding_unsupported", reason, NOTHING_STORED)
        elif name == b"content-length":
            length = int(value)
        elif name == b"idempotency-key":
            idempotency_key = _checked(value)
        elif name.startswith(HEADER_PREFIX):
            headers[name[len(HEADER_PREFIX) :].decode("latin-1")] = _text(name, value)
    return headers or None, idempotency_key, length


def _checked(value: bytes) -> str:
    text = _text(b"idempotency-key", value)
    if not 0 < len(text) <= IDEMPOTENCY_KEY_MAX:
        reason = f"Idempotency-Key has {len(text)} characters; 1 to {IDEMPOTENCY_KEY_MAX} are taken"
        raise HttpError(400, "idempotency_key_invalid", reason, NOTHING_STORED)
    return text


def _text(name: bytes, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise HttpError(400, "header_invalid", f"{name.decode('latin-1')} is not UTF-8", NOTHING_STORED) from None


async def _read_body(receive: Receive, length: int, limit: int) -> bytes | None:
    """The whole body; None when the client left. Over the limit it is refused before more of it is kept."""
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
    reason = f"a body of {size:,} bytes or more is over the limit of {limit:,}"
    return HttpError(413, "body_too_large", reason, NOTHING_STORED, {"connection": "close"})
