"""Permissions of a client: the keys that it may read and publish to, and whether it may change cursors.

The keys under `sessions/{id}/` are an exception: only a token of that session reads them, and it reads nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from time import time

from zbus.keys import KeySet, check_expression, check_key, includes
from zbus_web.http.http_errors import HttpError

SESSIONS = "sessions/"
NOTHING_DONE = "Nothing was read or changed"


class _Allowed:
    """A set of allowed keys: all keys, or those that match a list of expressions, which may be empty."""

    __slots__ = ("_keys", "all", "expressions")

    def __init__(self, expressions: Sequence[str] | None) -> None:
        self.all = expressions is None
        self._keys = KeySet(expressions) if expressions else None
        self.expressions = self._keys.expressions if self._keys is not None else ()

    def __contains__(self, key: str) -> bool:
        return self.all or (self._keys is not None and key in self._keys)

    def covers(self, expression: str) -> bool:
        return self.all or any(includes(each, expression) for each in self.expressions)


class Permissions:
    """Permissions of the client of a request. None for `read` or `publish` means all keys."""

    __slots__ = ("_publish", "_read", "_until", "name", "operate", "session")

    def __init__(
        self,
        name: str,
        *,
        read: Sequence[str] | None = (),
        publish: Sequence[str] | None = (),
        operate: bool = False,
        session: str | None = None,
        until: float | None = None,
    ) -> None:
        self.name, self.operate, self.session, self._until = name, operate, session, until
        self._read, self._publish = _Allowed(read), _Allowed(publish)

    @property
    def is_expired(self) -> bool:
        """Whether the token has expired. An open stream then ends."""
        return self._until is not None and time() >= self._until

    @property
    def view(self) -> Hashable:
        """A cache key: permissions with equal views see the same data."""
        return self._read.all, self._read.expressions, self.session

    @property
    def sees_all(self) -> bool:
        """Whether the client reads all keys except those of sessions. Only then does it see log records."""
        return self._read.all or "**" in self._read.expressions

    def check_read(self, expressions: Sequence[str]) -> None:
        """Raise `HttpError` unless every expression may be read. Raises `KeyInvalid` if one is not legal."""
        for expression in map(check_expression, expressions):
            if self.session is None and expression.startswith(SESSIONS):
                raise HttpError(
                    403,
                    "session_token_required",
                    f"{expression!r} can only be read with the token of that session",
                    NOTHING_DONE,
                )
            if not self.covers(expression):
                raise HttpError(
                    403,
                    "read_denied",
                    f"{self.name} may not read {expression!r}",
                    f"{NOTHING_DONE}. {self._readable()}",
                )

    def check_publish(self, key: str) -> None:
        """Raise `HttpError` unless the client may publish to this key. Raises `KeyInvalid` if the key is not legal."""
        check_key(key)
        if key not in self._publish:
            raise HttpError(403, "publish_denied", f"{self.name} may not publish to {key!r}", "Nothing was stored")

    def check_operate(self) -> None:
        """Raise `HttpError` unless the client may change cursors."""
        if not self.operate:
            raise HttpError(
                403, "operate_denied", f"{self.name} may read this, but not change it", "Nothing was changed"
            )

    def check_overview(self) -> None:
        """Raise `HttpError` for a session token, which sees its own events but not the state of the bus."""
        if self.session is not None:
            raise HttpError(403, "session_scope", f"{self.name} may read only the events of its session", NOTHING_DONE)

    def shows(self, key: str) -> bool:
        """Return whether events on this key may be shown."""
        if self.session is None and key.startswith(SESSIONS):
            return False
        return key in self._read

    def covers(self, expression: str) -> bool:
        """Return whether all keys that match a canonical expression may be read, or are filtered out (sessions)."""
        if self.session is None and expression.startswith(SESSIONS):
            return False
        return self._read.covers(expression)

    def _readable(self) -> str:
        return f"It may read {', '.join(self._read.expressions) or 'nothing'}"
