"""A session: what is published for it goes to everybody's key and to the session's own, together.

    session = bus.session("alice-7")
    await session.publish("events/Todo/1", {"done": True})

stores `events/Todo/1` and `sessions/alice-7/events/Todo/1` in one commit, so that after a crash there are both or
neither. Everybody who handles todos reads the first; the feed of this one session, which its signed token opens, has
the second. Payload and headers are the same, and a correlation id that both share tells that they belong together.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from time import time_ns
from typing import TYPE_CHECKING, Any

from .errors import BusClosed, ConfigInvalid, EventInvalid, KeyInvalid, ZbusError
from .event import Event
from .headers import decode_headers, encode_headers
from .keys import check_key
from .payload import encode_payload
from .publish.publisher import KEYS_TOLD_MAX
from .util.session_token import check_session_id, read_session, sign_session

if TYPE_CHECKING:
    from .bus import Bus
    from .deliver.subscriber import EventSubscriber

__all__ = ["SESSIONS", "Session", "Sources", "read_session", "sign_session"]

SESSIONS = "sessions"  # the first segment of every session's keys
PAIRS_PER_COMMIT = 500
BYTES_PER_COMMIT = 4 * 1024 * 1024
SOURCES_MAX = 10_000


class Sources:
    """Who publishes what sessions publish: one identity for each key, with sequences from 0, as publishers have them.

    They are the bus's, so that a session object made for one request alone begins no new ones. A key that was not
    used for long gets another identity, which readers do not notice.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def next(self, key: str) -> tuple[int, int]:
        """The publisher and the sequence of the next event on a key."""
        publisher_id, sequence = self._known.get(key) or (secrets.randbits(53), 0)
        self._known[key] = (publisher_id, sequence + 1)
        self._known.move_to_end(key)
        if len(self._known) > SOURCES_MAX:
            self._known.popitem(last=False)
        return publisher_id, sequence

    def take_back(self, events: Sequence[Event]) -> None:
        """These were refused, and nobody saw them: their sequences are free, so that readers count no gap."""
        for event in reversed(events):
            if self._known.get(event.key) == (event.publisher_id, event.sequence + 1):
                self._known[event.key] = event.identity


class Session:
    """One session of a bus, made by `bus.session("alice-7")`. It holds nothing: make one whenever it is handy."""

    __slots__ = ("_bus", "_sources", "id")

    def __init__(self, bus: Bus, session_id: str, sources: Sources) -> None:
        self._bus, self._sources = bus, sources
        self.id = check_session_id(session_id)

    def key(self, key: str) -> str:
        """The session's own key beside a global one.

        `bus.session("alice-7").key("events/Todo/1")` is `sessions/alice-7/events/Todo/1`.
        """
        check_key(key)
        if key.partition("/")[0] == SESSIONS:
            raise KeyInvalid(key, f"keys under {SESSIONS!r} are of single sessions: name the key that everybody reads")
        return self._bus.check_key(f"{SESSIONS}/{self.id}/{key}")

    async def publish(
        self, key: str, payload: Any, *, headers: Mapping[str, str] | None = None, correlation_id: str | None = None
    ) -> tuple[int, int]:
        """Publish to `key` and to the session's own key in one commit; returns both offsets once they are on disk.

        Where no correlation id is given, both get a new one. Errors as of `EventPublisher.publish`, and they are true
        of both events. Cancelled while it waits, both are stored, or neither.
        """
        own = self.key(key)
        await self._ready(key, own)
        return (await self._put(self._pair(key, own, payload, headers, correlation_id)))[0]

    async def publish_many(
        self,
        key: str,
        payloads: Iterable[Any],
        *,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
    ) -> Sequence[tuple[int, int]]:
        """Publish many in order, some hundreds to a commit, which never parts the two events of a payload.

        On an error, a note on it says how many payloads were stored before. Cancelled, a beginning may be stored.
        """
        own = self.key(key)
        stored: list[tuple[int, int]] = []
        pending: list[Event] = []
        size = 0
        try:
            for payload in payloads:
                pending += self._pair(key, own, payload, headers, correlation_id)
                size += len(pending[-1].payload) * 2
                if len(pending) >= PAIRS_PER_COMMIT * 2 or size >= BYTES_PER_COMMIT:
                    await self._ready(key, own)
                    batch, pending, size = pending, [], 0
                    stored += await self._put(batch)
            await self._ready(key, own)
            batch, pending = pending, []
            stored += await self._put(batch)
        except BaseException as error:  # also what `payloads` itself raises
            self._sources.take_back(pending)
            if isinstance(error, ZbusError):
                error.add_note(f"{len(stored)} payloads of this call were stored")
            raise
        return stored

    def subscribe(self, *key_exprs: str, **options: Any) -> EventSubscriber:
        """The session's own events that any of the expressions matches, all of them where none is given.

        Expressions are those of the global keys (`events/Todo/*`); events come with the session's key. Options as for
        `bus.subscribe`.
        """
        return self._bus.subscribe(*self.expressions(*key_exprs), **options)

    def expressions(self, *key_exprs: str) -> list[str]:
        """Key expressions of the session's own events, beside those of the global keys."""
        return [f"{SESSIONS}/{self.id}/{each}" for each in key_exprs or ("**",)]

    def token(self, ttl_s: float = 3600) -> str:
        """A signed token that opens this session's events, and nothing else, for `ttl_s` seconds.

        Raises `ConfigInvalid` where the bus was opened without `session_secret`.
        """
        secret = self._bus.config.session_secret
        if secret is None:
            raise ConfigInvalid("session_secret", "tokens are signed with it: open the bus with one, or name a file")
        return sign_session(secret.get_secret_value().encode(), self.id, ttl_s)

    def _pair(
        self, key: str, own: str, payload: Any, headers: Mapping[str, str] | None, correlation_id: str | None
    ) -> tuple[Event, Event]:
        body, kind = encode_payload(payload, self._bus.payload_bytes_max)
        same = decode_headers(encode_headers(headers, correlation_id or secrets.token_hex(16), kind))
        now = time_ns()
        return (
            Event(*self._sources.next(key), now, key, body, same),
            Event(*self._sources.next(own), now, own, body, same),
        )

    async def _put(self, events: Sequence[Event]) -> list[tuple[int, int]]:
        """Store pairs in one commit: `put` hands all of its events to the log at once."""
        try:
            offsets = await self._bus.put(*events)
        except EventInvalid:
            self._sources.take_back(events)
            raise
        return list(zip(offsets[::2], offsets[1::2], strict=True))

    async def _ready(self, key: str, own: str) -> None:
        """Wait as publishers do: for readers that must not drop, and for a log that is behind."""
        bus = self._bus
        for each in (key, own):
            if bus.gate.shut:
                await bus.room(each)
        if not bus.is_open:
            raise BusClosed("publish")
        if len(bus.published_keys) < KEYS_TOLD_MAX:
            bus.published_keys[key] = None  # not the session's own: other nodes need not know who is here
