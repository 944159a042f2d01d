"""The publishing end: one key, one identity, rising sequence numbers."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from time import time_ns
from typing import TYPE_CHECKING, Any

from zbus.errors import BusClosed, ZbusError
from zbus.headers import Traced, encode_headers
from zbus.payload import encode_payload
from zbus.scope import Scope

if TYPE_CHECKING:
    from zbus.bus import Bus
    from zbus.ports.log import Row

CHUNK_EVENTS = 1000
CHUNK_BYTES = 4 * 1024 * 1024
CHUNKS_IN_FLIGHT = 4
KEYS_TOLD_MAX = 1000


class EventPublisher:
    """Publishes to one key. Each publisher object is an identity of its own, with sequences from 0.

    Made by `await bus.publisher("shop/orders/created")` or by `EventPublisher.for_component(...)`.
    """

    __slots__ = ("_bus", "_sequence", "key", "publisher_id")

    def __init__(self, bus: Bus, key: str) -> None:
        self._bus, self.key = bus, bus.check_key(key)
        # 53 bits, so that it survives JSON; random, so that every incarnation is a new one.
        self.publisher_id = secrets.randbits(53)
        if len(bus.published_keys) < KEYS_TOLD_MAX:
            bus.published_keys[key] = None
        self._sequence = 0

    @classmethod
    async def for_namespace(cls, scope: Scope, topic: str) -> EventPublisher:
        """A publisher for a topic of a namespace: `for_namespace(bus.namespace("shop"), "news")`."""
        return cls(scope.bus, scope.key(topic, "namespace"))

    @classmethod
    async def for_component(cls, scope: Scope, topic: str) -> EventPublisher:
        """A publisher for a topic of a component: `for_component(bus.component("shop", "orders"), "created")`."""
        return cls(scope.bus, scope.key(topic, "component"))

    @classmethod
    async def for_endpoint(cls, scope: Scope, topic: str) -> EventPublisher:
        """A publisher for a topic of an endpoint: `for_endpoint(component.endpoint("api"), "called")`."""
        return cls(scope.bus, scope.key(topic, "endpoint"))

    @property
    def topic(self) -> str:
        """The last segment of the key."""
        return self.key.rpartition("/")[2]

    @property
    def sequence(self) -> int:
        """The sequence number that the next event will have."""
        return self._sequence

    async def publish(
        self, payload: Any, *, headers: Mapping[str, str] | None = None, correlation_id: str | None = None
    ) -> int:
        """Publish one event; returns its offset once it is on disk (0 where the bus keeps no log).

        Raises `EventInvalid` (never stored), or a `LogError` that says what is true of the event.
        Cancelled while it waits, the event may or may not be stored; the bus and this publisher go on.
        """
        bus = self._bus
        if bus.tracing is not None and type(headers) is not Traced:
            return await bus.tracing.publish(self, payload, headers, correlation_id)
        body, kind = encode_payload(payload, bus.payload_bytes_max)
        plain = kind is None and headers is None and correlation_id is None
        encoded = None if plain else encode_headers(headers, correlation_id, kind)
        if bus.gate.shut:
            await bus.room(self.key)
        if not bus.is_open:
            raise BusClosed("publish")
        if bus.checks is not None:
            bus.checks.hold(self.key, body)
        sequence = self._sequence
        self._sequence = sequence + 1
        row = (self.publisher_id, sequence, time_ns(), self.key, body, encoded)
        if encoded is not None and type(headers) is Traced:
            headers.sent = (self.publisher_id, sequence, len(body))
        if bus.commits is not None:
            return await bus.commits.add(row)
        if bus.deliver_unlogged((row,)):
            await asyncio.sleep(0)
        return 0

    async def publish_many(
        self,
        payloads: Iterable[Any],
        *,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
    ) -> Sequence[int]:
        """Publish many events in order, a thousand or so to a commit; returns their offsets.

        Each commit is stored whole or not at all. On an error, a note on it says how many events of
        this call were stored before. Cancelled, a beginning of `payloads` may be stored.
        """
        bus = self._bus
        if bus.tracing is not None and type(headers) is not Traced:
            return await bus.tracing.publish_many(self, payloads, headers, correlation_id)
        offsets: list[int] = []
        waiting: deque[asyncio.Future[Sequence[int]]] = deque()
        try:
            for rows in self._chunks(payloads, headers, correlation_id):
                if bus.gate.shut:
                    await bus.room(self.key)
                if not bus.is_open:
                    raise BusClosed("publish")
                if bus.commits is None:
                    await bus.deliver_many_unlogged(rows)
                    offsets += [0] * len(rows)
                    continue
                waiting.append(bus.commits.add_many(rows))
                if len(waiting) >= CHUNKS_IN_FLIGHT:
                    offsets += await waiting.popleft()
            while waiting:
                offsets += await waiting.popleft()
        except ZbusError as error:
            error.add_note(await _stored_before(offsets, waiting))
            raise
        return offsets

    def _chunks(
        self, payloads: Iterable[Any], headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> Iterable[list[Row]]:
        bus, limit, rows, size = self._bus, self._bus.payload_bytes_max, [], 0
        same: dict[str | None, bytes | None] = {}  # the headers of a call differ by the kind of payload alone
        for payload in payloads:
            body, kind = encode_payload(payload, limit)
            if bus.checks is not None:
                bus.checks.hold(self.key, body)
            if kind not in same:
                same[kind] = encode_headers(headers, correlation_id, kind)
            encoded = same[kind]
            rows.append((self.publisher_id, self._sequence, time_ns(), self.key, body, encoded))
            self._sequence += 1
            size += len(body)
            if len(rows) >= CHUNK_EVENTS or size >= CHUNK_BYTES:
                yield rows
                rows, size = [], 0
        if rows:
            yield rows


async def _stored_before(offsets: list[int], waiting: deque[asyncio.Future[Sequence[int]]]) -> str:
    """Wait for what is under way, so that the note on an error is true."""
    stored = len(offsets)
    while waiting:
        try:
            stored += len(await waiting.popleft())
        except ZbusError:
            pass
    return f"{stored} events of this call were stored"
