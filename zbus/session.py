"""A session: its events are published to a global key and to the session's own key together.

    session = bus.session("alice-7")
    await session.publish("events/Todo/1", {"done": True})

stores `events/Todo/1` and `sessions/alice-7/events/Todo/1` in one commit, so that after a crash both or neither exist.
Subscribers of all todos read the first; the event stream of this session, which its signed token opens, has the
second. Both have the same payload and headers, and share a correlation id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .deliver.subscriber import EventSubscriber
from .errors import ConfigInvalid, KeyInvalid, LogError, ZbusError
from .headers import CORRELATION_ID, takes_span
from .keys import check_key
from .payload import check_many
from .ports.log import Row
from .publish.entry import Entry
from .publish.publisher import stored_note
from .util.identities import Identities
from .util.session_token import check_session_id, sign_session_token

SESSIONS = "sessions"  # the first segment of every session's keys
_GLOBAL_KEY = f"keys under {SESSIONS!r} belong to single sessions: name the global key"
PAIRS_PER_COMMIT = 500
BYTES_PER_COMMIT = 4 * 1024 * 1024
SESSION_PUBLISHERS_MAX = 10_000


class Sessions(NamedTuple):
    """The shared state of all sessions of a bus. A new session object for each request starts no new publisher."""

    entry: Entry
    identities: Identities[str]
    subscribe: Callable[..., EventSubscriber]
    secret: bytes | None  # signs the tokens of sessions


class Session:
    """One session of a bus, created by `bus.session("alice-7")`. It has no state: create one whenever it is needed."""

    __slots__ = ("_shared", "id")

    def __init__(self, shared: Sessions, session_id: str) -> None:
        self._shared = shared
        self.id = check_session_id(session_id)

    def key(self, key: str) -> str:
        """Return the session's own key for a global key. Raises `KeyInvalid`.

        `bus.session("alice-7").key("events/Todo/1")` is `sessions/alice-7/events/Todo/1`.
        """
        check_key(key)
        if key.partition("/")[0] == SESSIONS:
            raise KeyInvalid(key, _GLOBAL_KEY)
        return check_key(f"{SESSIONS}/{self.id}/{key}")

    async def publish(
        self, key: str, payload: Any, *, headers: Mapping[str, str] | None = None, correlation_id: str | None = None
    ) -> tuple[int, int]:
        """Publish to `key` and to the session's own key in one commit. Returns both offsets once they are on disk.

        Without a correlation id, both events get the same new one. Raises the errors of `EventPublisher.publish`, which
        apply to both events. If cancelled while waiting, both events are stored or neither is.
        """
        (offsets,) = await self.publish_many(key, (payload,), headers=headers, correlation_id=correlation_id)
        return offsets

    async def publish_many(
        self,
        key: str,
        payloads: Iterable[Any],
        *,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
    ) -> Sequence[tuple[int, int]]:
        """Publish many payloads in order, up to 500 per commit. The two events of a payload are in the same commit.

        If an error is raised, its note has the number of payloads that are stored and of those that may be. If
        cancelled, the first payloads may have been stored.
        """
        entry = self._shared.entry
        key = entry.open_key(key)
        check_many(payloads)
        own = entry.open_key(self.key(key))
        if (tracing := entry.tracing) is not None and takes_span(headers):
            with tracing.sending("publish", key, headers, correlation_id) as span:
                return await self.publish_many(key, payloads, headers=span.headers, correlation_id=correlation_id)
        given = headers.get(CORRELATION_ID) if isinstance(headers, Mapping) else None
        stored: list[tuple[int, int]] = []
        chunk: list[tuple[bytes, bytes | None]] = []
        size = 0
        pairs_max = PAIRS_PER_COMMIT if entry.commits is not None else 1  # without a log there is no commit to share
        try:
            for payload in payloads:
                if stored and not chunk:  # the previous commit was awaited: access and transports may have changed
                    entry.open_key(key)
                    entry.open_key(own)
                body, encoded = entry.encode(key, payload, headers, correlation_id or given or entry.token_hex(16))
                entry.validate(own, body)
                chunk.append((body, encoded))
                size += len(body) * 2
                if len(chunk) >= pairs_max or size >= BYTES_PER_COMMIT:
                    stored += await self._store(key, own, chunk)
                    chunk, size = [], 0
            if chunk:
                stored += await self._store(key, own, chunk)
        except ZbusError as error:
            unknown = len(error.events) // 2 if isinstance(error, LogError) and error.outcome == "unknown" else 0
            error.add_note(stored_note(len(stored), unknown, "payload"))
            raise
        return stored

    def subscribe(self, *key_exprs: str, **options: Any) -> EventSubscriber:
        """Subscribe to the session's own events that match any of the expressions; the default is all of them.

        Expressions refer to the global keys (`events/Todo/*`); events have the session's key. Options as for
        `bus.subscribe`.
        """
        return self._shared.subscribe(*self.expressions(*key_exprs), **options)

    def expressions(self, *key_exprs: str) -> list[str]:
        """Return key expressions of the session's own events for expressions of global keys."""
        for each in key_exprs:
            if isinstance(each, str) and each.partition("/")[0] == SESSIONS:
                raise KeyInvalid(each, _GLOBAL_KEY)
        return [f"{SESSIONS}/{self.id}/{each}" for each in key_exprs or ("**",)]

    def token(self, ttl_s: float = 3600) -> str:
        """Return a signed token that grants access only to this session's events, for `ttl_s` seconds.

        Raises `ConfigInvalid` if the bus was opened without `session_secret`.
        """
        secret = self._shared.secret
        if secret is None:
            raise ConfigInvalid("session_secret", "it signs the tokens: open the bus with a secret, or name a file")
        return sign_session_token(secret, self.id, ttl_s, time_ns=self._shared.entry.time_ns)

    async def _store(self, key: str, own: str, chunk: Sequence[tuple[bytes, bytes | None]]) -> list[tuple[int, int]]:
        """Store payloads under both keys in one commit."""
        entry, next_identity = self._shared.entry, self._shared.identities.next
        await entry.admit((each, body) for body, _ in chunk for each in (key, own))
        entry.announce_key(key)  # not the session's own key: other nodes need not know which sessions exist
        rows: list[Row] = []
        for body, headers in chunk:
            now = entry.time_ns()
            rows += [Row(*next_identity(each), now, each, body, headers) for each in (key, own)]
        offsets, _, _ = await entry.store(rows)
        return list(zip(offsets[::2], offsets[1::2], strict=True))
