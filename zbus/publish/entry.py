"""The publish path: every event that is published on this node passes through here.

The steps, in order: open → access → key → payload and headers → schema → backpressure → identity → store. A bus that
is closed or read-only rejects every event. Access comes next, so that an event that may not be published costs nothing
and reveals nothing. The schema comes before backpressure, so that a rejected event never waits. Backpressure is the
last wait: nothing may be awaited between numbering an event and handing it to the commit queue, or a publisher's order
is lost. A sequence number is taken only after every step that can reject the event, so none is wasted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from zbus.errors import (
    BusClosed,
    EventInvalid,
    EventTooLarge,
    IdentityConflict,
    LogReadOnly,
    WrongLoop,
    ZbusError,
)
from zbus.event import NUMBER_MAX, Event, Offset, offset_of
from zbus.headers import check_encoded, encode_headers, takes_span
from zbus.payload import encode_payload
from zbus.ports.log import Row, Stored
from zbus.util.runtime import Runtime

from .backpressure import Backpressure
from .commit_queue import CommitQueue
from .host import Access, Host, Validators

if TYPE_CHECKING:
    from zbus.observe.tracing import Sending, Tracing

KEYS_ANNOUNCED_MAX = 1000
UNYIELDED_MAX = 512  # events delivered without a log before subscribers run
PUT_EVENTS = 1000  # of one `put` in one commit, which other publishers have to wait for


class Entry:
    """The publish path of a node. Publishers, sessions, proxied writes and adapters share it, on the event loop."""

    def __init__(self, host: Host, backpressure: Backpressure, payload_bytes_max: int, runtime: Runtime) -> None:
        self._host, self.backpressure, self.payload_bytes_max = host, backpressure, payload_bytes_max
        self.deliver = host.deliver_unlogged  # delivers rows of one key if no log stores them
        self.time_ns, self.randbits, self.token_hex = runtime.time_ns, runtime.randbits, runtime.token_hex
        # Rises when a result of `open_key` may change: publishers compare it instead of calling that for each event.
        self.generation = 0
        self.renewals = 0  # how often publishers had to get new ids
        self._is_open = False
        self.closed_because = ""  # why the bus is not open, if that is unusual
        # The event loop of the bus, and its thread, once the bus is open.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.loop_is_running: Callable[[], bool] = bool
        self.thread = 0
        self.read_only: str | None = None  # the path of a log that this node only reads; set before the bus opens
        self._access: Access | None = None
        self.validators: Validators | None = None  # None if no schema is registered
        self.tracing: Tracing | None = None
        self.commits: CommitQueue | None = None  # None if no log stores events
        self.published_events = 0
        self.published_keys: dict[str, None] = {}  # announced to other nodes; at most KEYS_ANNOUNCED_MAX

    @property
    def is_open(self) -> bool:
        """Whether the bus is open."""
        return self._is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        self._is_open = is_open
        if is_open:
            self.loop, self.thread = asyncio.get_running_loop(), get_ident()
            self.loop_is_running = self.loop.is_running
        self.recheck()

    @property
    def access(self) -> Access | None:
        """The access rules. Assign a new object to change them."""
        return self._access

    @access.setter
    def access(self, access: Access | None) -> None:
        self._access = access
        self.recheck()

    def recheck(self) -> None:
        """Make publishers check their keys again, because transports or access rules changed or the bus closed."""
        self.generation += 1

    def renew_identities(self) -> None:
        """Give each publisher a new id with its next event, because a copy of this process may use the same ones."""
        self.renewals += 1
        self.recheck()

    def check_open(self) -> None:
        """Raise an error if nothing can be published by this call.

        That is `BusClosed` if the bus is not open, `WrongLoop` on another event loop than that of the bus, and
        `LogReadOnly` if the bus only reads its log.
        """
        self.check_usable("publish")
        if self.read_only is not None:
            raise LogReadOnly(self.read_only)

    def check_usable(self, doing: str) -> None:
        """Raise `BusClosed` if the bus is not open, or `WrongLoop` on another event loop than that of the bus."""
        if not self._is_open:
            raise BusClosed(doing, self.closed_because)
        if _running_loop() is not self.loop:
            raise WrongLoop(doing)

    def open_key(self, key: str) -> str:
        """Return the key if events may be published to it now. Raises the errors of `check_open` and `check_key`."""
        self.check_open()
        return self.check_key(key)

    def check_key(self, key: str) -> str:
        """Return the key if this node may publish to it. Raises `KeyInvalid` or an access error."""
        if self.access is not None:
            self.access.check_publish(key)
        return self._host.check_key(key)

    def announce_key(self, key: str) -> None:
        """Announce to other nodes that this node publishes to a key."""
        if self.read_only is None and len(self.published_keys) < KEYS_ANNOUNCED_MAX:
            self.published_keys[key] = None

    def announce_keys(self, rows: Iterable[Row]) -> None:
        """Announce the keys of events that no publisher of this node has numbered."""
        for key in {row.key: None for row in rows}:
            self.announce_key(key)

    def encode(
        self, key: str, payload: Any, headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> tuple[bytes, bytes | None]:
        """Return the encoded payload and headers of an event that matches the schemas of its key."""
        body, kind = encode_payload(payload, self.payload_bytes_max)
        plain = kind is None and headers is None and correlation_id is None
        encoded = None if plain else encode_headers(headers, correlation_id, kind)
        if self.validators is not None:
            self.validators.validate(key, body)
        return body, encoded

    def validate(self, key: str, body: bytes) -> None:
        """Raise `SchemaInvalid` if a strict schema of `key` rejects a payload that is published to another key too."""
        if self.validators is not None:
            self.validators.validate(key, body)

    def encode_many(
        self, key: str, payloads: Iterable[Any], headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> Iterator[tuple[bytes, bytes | None]]:
        """Encode and validate many payloads that share their headers, which differ only by the content type."""
        encoded: dict[str | None, bytes | None] = {}
        for payload in payloads:
            body, kind = encode_payload(payload, self.payload_bytes_max)
            if kind not in encoded:
                encoded[kind] = encode_headers(headers, correlation_id, kind)
            if self.validators is not None:
                self.validators.validate(key, body)
            yield body, encoded[kind]

    async def admit(self, events: Iterable[tuple[str, bytes]]) -> None:
        """Wait for capacity for these keys and payloads: the last wait before an event is numbered.

        The bus, access, transports and schemas may change during the wait, so the steps that depend on them are then
        repeated. If cancelled, nothing was stored.
        """
        if not self.backpressure.blocked:
            return self.check_open()
        events = tuple(events)
        keys = tuple(dict.fromkeys(key for key, _ in events))
        validators = self.validators
        await self.backpressure.wait(lambda reasons: self.is_open and self._host.is_blocked(reasons, keys))
        for key in keys:
            self.open_key(key)
        if self.validators is not None and self.validators is not validators:
            for key, body in events:
                self.validators.validate(key, body)

    async def store(self, rows: Sequence[Row]) -> Stored:
        """Store rows in one commit and return their offsets, or only deliver them if there is no log.

        Without a log, all rows are delivered before anything is awaited, so cancellation cannot separate them.
        """
        if self.commits is not None:
            return await self.commits.add_many(rows)
        crowded = [self.deliver((row,)) for row in rows]  # a list: all of them, before anything is awaited
        if any(crowded):
            await asyncio.sleep(0)
        return Stored([0] * len(rows))

    async def put(self, events: Sequence[Event], span: Sending | None = None) -> Sequence[Offset]:
        """Store events that already have an identity, up to `PUT_EVENTS` per commit. None is stored if one is invalid.

        If cancelled, they may or may not have been stored.
        """
        self.check_open()
        keys = {key: self.open_key(key) for key in dict.fromkeys(event.key for event in events)}
        rows: list[Row] = []
        for event in events:
            check_identity(event)
            headers = event.headers
            if span is not None and takes_span(headers):
                headers = span.onto(headers)
            key = keys[event.key]
            body, encoded = self.encode(key, event.payload, headers or None, None)
            # The encoders accept no subclass of int, such as the offset that `publish` returns.
            identity = int(event.publisher_id), int(event.sequence), int(event.published_at)
            rows.append(Row(*identity, key, body, encoded))
        found: list[Offset] = []
        # Without a log there is no commit to share: each event waits for capacity separately.
        size = PUT_EVENTS if self.commits is not None else 1
        try:
            for first in range(0, len(rows), size):
                part = rows[first : first + size]
                await self.admit((row.key, row.payload) for row in part)
                self.announce_keys(part)
                offsets, repeated, _ = await self.store(part)
                found += [
                    offset_of(offset, row.publisher_id, row.sequence, at not in repeated)
                    for at, (offset, row) in enumerate(zip(offsets, part, strict=True))
                ]
        except IdentityConflict as error:
            error.add_note(f"{len(found) + len(part) - len(error.events)} events of this call are stored")
            raise
        except ZbusError as error:
            error.add_note(f"{len(found)} events of this call were stored; it is safe to put all of them again")
            raise
        return found

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Check rows that another process encoded as if they were published here. Raises `EventInvalid`."""
        check_rows(rows, self.open_key, self.payload_bytes_max, self.validators)


def check_rows(
    rows: Sequence[Row],
    open_key: Callable[[str], object],
    payload_bytes_max: int,
    validators: Validators | None,
) -> None:
    """Raise `EventInvalid` if a row could not have been published: its key, identity, size, headers or schema."""
    for key in {row.key: None for row in rows}:
        open_key(key)
    for row in rows:
        check_identity(row)
    largest = max([len(row.payload) for row in rows], default=0)
    if largest > payload_bytes_max:
        raise EventTooLarge("payload", largest, payload_bytes_max)
    for headers in {row.headers: None for row in rows if row.headers}:
        check_encoded(headers)
    if validators is not None:
        for row in rows:
            validators.validate(row.key, row.payload)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def check_identity(given: Event | Row) -> None:
    """Raise `EventInvalid` if a number of an event's identity is out of the range of logs and frames.

    This is checked here, like payload and headers, because the log could not encode such a number, and its error would
    fail every other event in the same commit.
    """
    for name in ("publisher_id", "sequence", "published_at"):
        number = getattr(given, name)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= NUMBER_MAX:
            raise EventInvalid(f"{name} {number!r} rejected: it must be an integer from 0 to 2^63 - 1; not stored")
