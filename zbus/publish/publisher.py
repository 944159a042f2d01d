"""The publisher of events: one key, one identity, rising sequence numbers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any

from zbus.errors import LogError
from zbus.event import Offset
from zbus.headers import SpanHeaders, takes_span
from zbus.payload import check_many
from zbus.ports.log import Row, Stored
from zbus.scope import Scope
from zbus.util.identities import first_identity

from .entry import UNYIELDED_MAX, Entry

CHUNK_EVENTS = 1000
CHUNK_BYTES = 4 * 1024 * 1024
CHUNKS_IN_FLIGHT = 4
UNCHECKED = -1  # the first event checks that the bus is open


class EventPublisher:
    """Publishes to one key. Each publisher object has its own identity, with sequences from 0.

    The identity changes only if a copy of this process is found, which uses the same one.

    Create one with `await bus.publisher("shop/orders/created")` or `EventPublisher.for_component(...)`.
    """

    __slots__ = ("_entry", "_generation", "_renewals", "_sequence", "key", "publisher_id")

    def __init__(self, entry: Entry, key: str) -> None:
        self._entry, self.key = entry, entry.check_key(key)
        self._generation, self._renewals = UNCHECKED, entry.renewals
        self.publisher_id, self._sequence = first_identity(entry.randbits)
        entry.announce_key(key)

    @classmethod
    async def for_namespace(cls, scope: Scope, topic: str) -> EventPublisher:
        """Return a publisher for a namespace's topic: `for_namespace(bus.namespace("shop"), "news")`."""
        publisher: EventPublisher = await scope.bus.publisher(scope.key(topic, "namespace"))
        return publisher

    @classmethod
    async def for_component(cls, scope: Scope, topic: str) -> EventPublisher:
        """Return a publisher for a component's topic: `for_component(bus.component("shop", "orders"), "created")`."""
        publisher: EventPublisher = await scope.bus.publisher(scope.key(topic, "component"))
        return publisher

    @classmethod
    async def for_endpoint(cls, scope: Scope, topic: str) -> EventPublisher:
        """Return a publisher for an endpoint's topic: `for_endpoint(component.endpoint("api"), "called")`."""
        publisher: EventPublisher = await scope.bus.publisher(scope.key(topic, "endpoint"))
        return publisher

    @property
    def topic(self) -> str:
        """The last segment of the key."""
        return self.key.rpartition("/")[2]

    @property
    def sequence(self) -> int:
        """The sequence number of the next event."""
        return self._sequence

    async def publish(
        self, payload: Any, *, headers: Mapping[str, str] | None = None, correlation_id: str | None = None
    ) -> Offset:
        """Publish one event. Returns its offset once it is on disk (0 if the bus has no log).

        The offset is an `int` that also has `publisher_id`, `sequence` and `first`.

        Raises `EventInvalid` (the event was not stored), or a `LogError` that states whether it was stored.
        If cancelled while waiting, the event may or may not have been stored. The bus and this publisher remain usable.
        """
        entry = self._entry
        if (tracing := entry.tracing) is not None and takes_span(headers):
            with tracing.sending("publish", self.key, headers, correlation_id) as span:
                return await self.publish(payload, headers=span.headers, correlation_id=correlation_id)
        # On another loop, the event would be stored and its caller would wait forever. If the loop of the bus runs in
        # this thread, then it is the running one; asking asyncio for that takes three times as long.
        if self._generation != entry.generation or get_ident() != entry.thread or not entry.loop_is_running():
            self._check_key()
        body, encoded = payload, None
        # The hot path has nothing to encode and nothing to validate.
        if (
            type(payload) is not bytes
            or headers is not None
            or correlation_id is not None
            or entry.validators is not None
            or len(payload) > entry.payload_bytes_max
        ):
            body, encoded = entry.encode(self.key, payload, headers, correlation_id)
        if entry.backpressure.blocked:
            await entry.admit(((self.key, body),))
        sequence = self._sequence
        self._sequence = sequence + 1
        row = Row(self.publisher_id, sequence, entry.time_ns(), self.key, body, encoded)
        if encoded is not None and type(headers) is SpanHeaders:
            headers.sent = (self.publisher_id, sequence, len(body))
        if entry.commits is not None:
            return await entry.commits.add(row)
        if entry.deliver((row,)):
            await asyncio.sleep(0)
        offset = Offset(0)
        offset.identity = (self.publisher_id, sequence)
        return offset

    async def publish_many(
        self,
        payloads: Iterable[Any],
        *,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
    ) -> Sequence[int]:
        """Publish many events in order, up to 1,000 per commit. Returns their offsets.

        Each commit is stored completely or not at all. If an error is raised, its note has the number of events of this
        call that are stored and of those that may be; the `events` of a `LogError` are all that are not known to be.
        If cancelled, the first events of `payloads` may have been stored.
        """
        entry = self._entry
        if (tracing := entry.tracing) is not None and takes_span(headers):
            with tracing.sending("publish", self.key, headers, correlation_id) as span:
                offsets = await self.publish_many(payloads, headers=span.headers, correlation_id=correlation_id)
                span.note("messaging.batch.message_count", len(offsets))
                return offsets
        self._check_key()
        check_many(payloads)
        stored: list[int] = []
        waiting: deque[asyncio.Future[Stored]] = deque()
        try:
            for bodies in self._chunks(payloads, headers, correlation_id):
                await entry.admit((self.key, body) for body, _ in bodies)
                rows = self._number(bodies)
                if entry.commits is None:
                    crowded = entry.deliver(rows)
                    stored += [0] * len(rows)
                    if crowded:
                        await asyncio.sleep(0)
                    continue
                waiting.append(entry.commits.add_many(rows))
                if len(waiting) >= CHUNKS_IN_FLIGHT:
                    stored += (await waiting.popleft()).offsets
            while waiting:
                stored += (await waiting.popleft()).offsets
        except Exception as error:
            await _add_outcome(error, len(stored), waiting)
            raise
        finally:
            for each in waiting:  # if cancelled: their results are not used
                each.add_done_callback(_retrieve_error)
        return stored

    def _chunks(
        self, payloads: Iterable[Any], headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> Iterable[list[tuple[bytes, bytes | None]]]:
        """Yield encoded payloads and headers in chunks, each for one commit.

        Without a log, a chunk is delivered before subscribers run. The caller awaits between two chunks, so the key is
        checked again before the next one.
        """
        entry, size = self._entry, 0
        events_max = CHUNK_EVENTS if entry.commits is not None else UNYIELDED_MAX
        chunk: list[tuple[bytes, bytes | None]] = []
        for each in entry.encode_many(self.key, payloads, headers, correlation_id):
            chunk.append(each)
            size += len(each[0])
            if len(chunk) >= events_max or size >= CHUNK_BYTES:
                yield chunk
                self._check_key()
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _number(self, bodies: Sequence[tuple[bytes, bytes | None]]) -> list[Row]:
        """Return rows with the next sequence numbers. Nothing may reject them after this."""
        publisher_id, key, time_ns, first = self.publisher_id, self.key, self._entry.time_ns, self._sequence
        self._sequence = first + len(bodies)
        return [
            Row(publisher_id, sequence, time_ns(), key, body, headers)
            for sequence, (body, headers) in enumerate(bodies, first)
        ]

    def _check_key(self) -> None:
        """Check that the bus is open and that events may be published to the key now."""
        entry = self._entry
        entry.open_key(self.key)
        self._generation = entry.generation
        if self._renewals != entry.renewals:
            self._renewals = entry.renewals
            self.publisher_id, self._sequence = first_identity(entry.randbits)


async def _add_outcome(error: Exception, stored: int, waiting: deque[asyncio.Future[Stored]]) -> None:
    """Wait for commits in flight. Adds what became of the events of all commits to the error that ended the call."""
    failed = [error] if isinstance(error, LogError) else []
    while waiting:
        try:
            stored += len((await waiting.popleft()).offsets)
        except LogError as another:
            failed.append(another)
    unknown = sum([len(each.events) for each in failed if each.outcome == "unknown"])
    if isinstance(error, LogError):
        error.events = tuple([event for each in failed for event in each.events])
        error.outcome = "unknown" if unknown else error.outcome
    error.add_note(stored_note(stored, unknown, "event"))


def stored_note(stored: int, unknown: int, noun: str) -> str:
    """Return the note of an error that ended a call with many events."""
    many = f"1 {noun} of this call is stored" if stored == 1 else f"{stored} {noun}s of this call are stored"
    return many + (f"; {unknown} more may be" if unknown else "")


def _retrieve_error(stored: asyncio.Future[Stored]) -> None:
    """Retrieve the error of a future: asyncio logs errors that are never retrieved."""
    if not stored.cancelled():
        stored.exception()
