"""The publish path: every event that is published on this node passes through here.

The steps, in order: open → access → key → payload and headers → schema → backpressure → identity → store. Access comes
first, so that an event that may not be published costs nothing and reveals nothing. The schema comes before
backpressure, so that a rejected event never waits. Backpressure is the last wait: nothing may be awaited between
numbering an event and handing it to the commit queue, or a publisher's order is lost. A sequence number is taken only
after every step that can reject the event, so none is wasted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from zbus.errors import BusClosed, EventInvalid, EventTooLarge
from zbus.event import Event
from zbus.headers import decode_headers, encode_headers
from zbus.payload import encode_payload
from zbus.ports.log import Row
from zbus.util.runtime import Runtime

from .backpressure import Backpressure
from .commit_queue import Commits
from .host import Access, Host, Validators

if TYPE_CHECKING:
    from zbus.observe.tracing import Sending, Tracing

KEYS_ANNOUNCED_MAX = 1000
UNYIELDED_MAX = 512  # events delivered without a log before subscribers have their turn


class Entry:
    """Lives on the event loop. The node has one; publishers, sessions, proxied writes and adapters share it."""

    def __init__(self, host: Host, backpressure: Backpressure, payload_bytes_max: int, runtime: Runtime) -> None:
        self._host, self.backpressure, self.payload_bytes_max = host, backpressure, payload_bytes_max
        self.time_ns, self.randbits, self.token_hex = runtime.time_ns, runtime.randbits, runtime.token_hex
        self.is_open = False
        self.access: Access | None = None
        self.validators: Validators | None = None  # None if no schema is registered
        self.tracing: Tracing | None = None
        self.commits: Commits | None = None  # None if no log stores events
        self.transports = 0  # rises whenever a transport is added: publishers then check their key again
        self.published_events = 0
        self.published_keys: dict[str, None] = {}  # for other nodes to know; the first ones, if there are many

    def check_open(self) -> None:
        """Raise `BusClosed` if the bus is not open."""
        if not self.is_open:
            raise BusClosed("publish")

    def open_key(self, key: str) -> str:
        """Return the key if events may be published to it now."""
        self.check_open()
        if self.access is not None:
            self.access.check_publish(key)
        return self._host.check_key(key)

    def announce_key(self, key: str) -> None:
        """Let other nodes know that this node publishes to a key."""
        if len(self.published_keys) < KEYS_ANNOUNCED_MAX:
            self.published_keys[key] = None

    def encode(
        self, key: str, payload: Any, headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> tuple[bytes, bytes | None]:
        """Return the encoded payload and headers of an event that matches the schemas of its key."""
        body, kind = encode_payload(payload, self.payload_bytes_max)
        plain = kind is None and headers is None and correlation_id is None
        encoded = None if plain else encode_headers(headers, correlation_id, kind)
        if self.validators is not None:
            self.validators.hold(key, body)
        return body, encoded

    def validate(self, key: str, body: bytes) -> None:
        """Raise `SchemaInvalid` if a strict schema of `key` rejects a payload that is published to another key too."""
        if self.validators is not None:
            self.validators.hold(key, body)

    def encode_many(
        self, key: str, payloads: Iterable[Any], headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> Iterator[tuple[bytes, bytes | None]]:
        """The same for many payloads that share their headers, which differ only by the content type."""
        encoded: dict[str | None, bytes | None] = {}
        for payload in payloads:
            body, kind = encode_payload(payload, self.payload_bytes_max)
            if kind not in encoded:
                encoded[kind] = encode_headers(headers, correlation_id, kind)
            if self.validators is not None:
                self.validators.hold(key, body)
            yield body, encoded[kind]

    async def admit(self, events: Iterable[tuple[str, bytes]]) -> None:
        """Wait for capacity for these keys and payloads: the last wait before an event is numbered.

        Schemas and transports may change during the wait, so both are then checked again. If cancelled, nothing was
        stored.
        """
        if self.backpressure.blocked:
            events = tuple(events)
            keys = tuple(dict.fromkeys(key for key, _ in events))
            validators, transports = self.validators, self.transports
            await self.backpressure.wait(lambda reasons: self.is_open and self._host.is_blocked(reasons, keys))
            if self.transports != transports:
                for key in keys:
                    self.open_key(key)
            if self.validators is not None and self.validators is not validators:
                for key, body in events:
                    self.validators.hold(key, body)
        self.check_open()

    async def store(self, rows: Sequence[Row]) -> Sequence[int]:
        """Store rows in one commit and return their offsets, or only deliver them if there is no log."""
        if self.commits is not None:
            return await self.commits.add_many(rows)
        for at, row in enumerate(rows):
            if self._host.deliver_unlogged((row,)) and at + 1 < len(rows):
                await asyncio.sleep(0)
        return [0] * len(rows)

    async def put(self, events: Sequence[Event], span: Sending | None = None) -> Sequence[int]:
        """Store events that already have an identity. If cancelled, they may or may not have been stored."""
        rows: list[Row] = []
        for event in events:
            self.open_key(event.key)
            headers = event.headers if span is None else span.onto(event.headers)
            body, encoded = self.encode(event.key, event.payload, headers or None, None)
            rows.append((event.publisher_id, event.sequence, event.published_at, event.key, body, encoded))
        if not rows:
            return []
        await self.admit((row[3], row[4]) for row in rows)
        return await self.store(rows)

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Check rows that another process encoded as if they were published here. Raises `EventInvalid`."""
        check_rows(rows, self.open_key, self.payload_bytes_max, self.validators)

    def deliver(self, rows: Sequence[Row]) -> bool:
        """Deliver rows of one key that no log stores. Returns whether subscribers should run now."""
        return self._host.deliver_unlogged(rows)

    async def deliver_many(self, rows: Sequence[Row]) -> None:
        """The same for many rows of one key, with turns for subscribers in between."""
        for at in range(0, len(rows), UNYIELDED_MAX):
            if self._host.deliver_unlogged(rows[at : at + UNYIELDED_MAX]):
                await asyncio.sleep(0)


def check_rows(
    rows: Sequence[Row],
    open_key: Callable[[str], object],
    payload_bytes_max: int,
    validators: Validators | None,
) -> None:
    """Raise `EventInvalid` if a row could not have been published: its key, its size, its headers or its schema."""
    for key in {row[3]: None for row in rows}:
        open_key(key)
    largest = max([len(row[4]) for row in rows], default=0)
    if largest > payload_bytes_max:
        raise EventTooLarge("payload", largest, payload_bytes_max)
    for headers in {row[5]: None for row in rows if row[5]}:
        try:
            encode_headers(dict(decode_headers(headers)), None, None)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EventInvalid(f"headers that do not decode ({error}); not stored") from error
    if validators is not None:
        for row in rows:
            validators.hold(row[3], row[4])
