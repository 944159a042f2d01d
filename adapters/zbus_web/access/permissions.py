"""What somebody may do: which keys they read and publish to, and whether they may change what others use.

The keys under `sessions/{id}/` are an exception to all permissions: only the grant of that very session reads them,
and it reads nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from time import time

from zbus.keys import KeySet, check_expression, check_key, includes
from zbus_web.http.http_errors import HttpError

SESSIONS = "sessions/"
NOTHING_DONE = "Nothing was read or changed"


class _Allowed:
    """Keys that somebody may read, or publish to: those of some expressions, perhaps none, or all."""

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
    """What the caller of a request may do. `read` and `publish`: None stands for all keys."""

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
    def is_over(self) -> bool:
        """Whether its time has passed: a feed that is open then ends."""
        return self._until is not None and time() >= self._until

    @property
    def view(self) -> Hashable:
        """Those with an equal view are shown the same."""
        return self._read.all, self._read.expressions, self.session

    @property
    def sees_all(self) -> bool:
        """Whether it reads all keys but those of sessions; who does is also told what went wrong with which key."""
        return self._read.all or "**" in self._read.expressions

    def check_read(self, expressions: Sequence[str]) -> None:
        """Raise `HttpError` unless each of the expressions may be read; `KeyInvalid` for one that is not legal."""
        for expression in map(check_expression, expressions):
            if self.session is None and expression.startswith(SESSIONS):
                raise HttpError(
                    403, "session_token_needed", f"{expression!r} is read with the token of that session", NOTHING_DONE
                )
            if not self.covers(expression):
                raise HttpError(
                    403, "read_refused", f"{self.name} may not read {expression!r}", f"{NOTHING_DONE}. {self._may()}"
                )

    def check_publish(self, key: str) -> None:
        """Raise `HttpError` unless events may be published to this key; `KeyInvalid` where nobody could."""
        check_key(key)
        if key not in self._publish:
            raise HttpError(403, "publish_refused", f"{self.name} may not publish to {key!r}", "Nothing was stored")

    def check_operate(self) -> None:
        """Raise `HttpError` unless cursors and the like may be changed."""
        if not self.operate:
            raise HttpError(403, "operate_refused", f"{self.name} may look, but not change this", "Nothing was changed")

    def check_overview(self) -> None:
        """Raise `HttpError` for the token of a session, which is shown its own events and nothing of the bus."""
        if self.session is not None:
            raise HttpError(403, "session_scope", f"{self.name} reads events of its session alone", NOTHING_DONE)

    def shows(self, key: str) -> bool:
        """Whether an event of this very key may be shown."""
        if self.session is None and key.startswith(SESSIONS):
            return False
        return key in self._read

    def covers(self, expression: str) -> bool:
        """Whether everything that a canonical expression asks for may be read, or is filtered out (sessions)."""
        if self.session is None and expression.startswith(SESSIONS):
            return False
        return self._read.covers(expression)

    def _may(self) -> str:
        return f"It may read {', '.join(self._read.expressions) or 'nothing'}"
