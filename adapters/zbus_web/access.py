"""Who asks, and what they may do: bearer tokens with key permissions, and signed tokens of sessions.

Without a token configured everybody may do everything, as long as only this machine can ask. The keys under
`sessions/{id}/` are an exception to all of this: they are read with a token that was signed for that very session,
and with nothing else, and such a token opens nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from starlette.datastructures import Headers, QueryParams
from starlette.requests import HTTPConnection
from starlette.types import Scope

from zbus.errors import ZbusError
from zbus.keys import KeySet, check_expression, check_key, includes
from zbus.session import read_session

from .origins import Origins
from .refusals import Refusal

if TYPE_CHECKING:
    from .settings import WebSettings

COOKIE = "zbus_token"
QUERY = "access_token"
SESSIONS = "sessions/"
SAFE = ("GET", "HEAD", "OPTIONS")
_FOUND = "zbus.grant"
_NOTHING_DONE = "Nothing was read or changed"


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


class Grant:
    """What the caller of a request may do. `read` and `publish`: None stands for all keys."""

    __slots__ = ("_publish", "_read", "name", "operate", "session")

    def __init__(
        self,
        name: str,
        *,
        read: Sequence[str] | None = (),
        publish: Sequence[str] | None = (),
        operate: bool = False,
        session: str | None = None,
    ) -> None:
        self.name, self.operate, self.session = name, operate, session
        self._read, self._publish = _Allowed(read), _Allowed(publish)

    @property
    def view(self) -> Hashable:
        """Those with an equal view are shown the same."""
        return self._read.all, self._read.expressions, self.session

    @property
    def sees_all(self) -> bool:
        """Whether it reads all keys but those of sessions; who does is also told what went wrong with which key."""
        return self._read.all or "**" in self._read.expressions

    def check_read(self, expressions: Sequence[str]) -> None:
        """Raise `Refusal` unless each of the expressions may be read; `KeyInvalid` for one that is not legal."""
        for expression in map(check_expression, expressions):
            if self.session is None and expression.startswith(SESSIONS):
                raise Refusal(
                    403, "session_token_needed", f"{expression!r} is read with the token of that session", _NOTHING_DONE
                )
            if not self.covers(expression):
                raise Refusal(
                    403, "read_refused", f"{self.name} may not read {expression!r}", f"{_NOTHING_DONE}. {self._may()}"
                )

    def check_publish(self, key: str) -> None:
        """Raise `Refusal` unless events may be published to this key; `KeyInvalid` where nobody could."""
        check_key(key)
        if key not in self._publish:
            raise Refusal(403, "publish_refused", f"{self.name} may not publish to {key!r}", "Nothing was stored")

    def check_operate(self) -> None:
        """Raise `Refusal` unless cursors and the like may be changed."""
        if not self.operate:
            raise Refusal(403, "operate_refused", f"{self.name} may look, but not change this", "Nothing was changed")

    def check_overview(self) -> None:
        """Raise `Refusal` for the token of a session, which is shown its own events and nothing of the bus."""
        if self.session is not None:
            raise Refusal(403, "session_scope", f"{self.name} reads events of its session alone", _NOTHING_DONE)

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


class _Known(NamedTuple):
    digest: bytes
    grant: Grant


class Access:
    """Finds the grant of a request: by `Authorization: Bearer`, the cookie `zbus_token`, or `?access_token=`."""

    def __init__(self, settings: WebSettings, session_secret: bytes | None) -> None:
        self._secret = session_secret
        self._origins = Origins(settings)
        self._tokens = [
            _Known(
                _digest(each.secret()),
                Grant(each.name, read=each.read, publish=each.publish, operate=each.operate),
            )
            for each in settings.tokens
        ]
        self._anonymous = None if self._tokens else Grant("anonymous", read=None, publish=None, operate=True)

    def grant(self, connection: HTTPConnection) -> Grant:
        """What this request may do; raises `Refusal` (401) where it is nobody's. Found out once for each request."""
        found = self.found(connection.scope)
        if isinstance(found, Refusal):
            raise found
        return found

    def found(self, scope: Scope) -> Grant | Refusal:
        """The same, with the refusal as a value."""
        found: Grant | Refusal | None = scope.get(_FOUND)
        if found is None:
            try:
                found = self._find(scope)
            except Refusal as refusal:
                found = refusal
            scope[_FOUND] = found
        return found

    def _find(self, scope: Scope) -> Grant:
        token, by_cookie = _credential(scope)
        if token is None:
            if self._anonymous is None:
                raise _unknown("token_needed", "this server wants a token", "")
            return self._anonymous
        if by_cookie and (scope["type"] == "websocket" or scope["method"] not in SAFE):
            # A browser sends a cookie along with whatever any page asks for: without an origin nobody knows which.
            headers = Headers(scope=scope)
            if "origin" not in headers:
                raise Refusal(
                    403,
                    "origin_needed",
                    "a request with a cookie that changes something names its Origin",
                    _NOTHING_DONE,
                )
            self._origins.check(", ".join(headers.getlist("host")), ", ".join(headers.getlist("origin")))
        return self._by_token(token)

    def _by_token(self, token: str) -> Grant:
        given, found = _digest(token), None
        for known in self._tokens:  # all of them, so that the time it takes tells nothing
            if hmac.compare_digest(known.digest, given):
                found = known.grant
        if found is not None:
            return found
        if self._secret is not None:
            try:
                session = read_session(self._secret, token)
                if "/" in session:
                    raise ZbusError("the id of a session is one segment of a key")
                check_key(SESSIONS + session)
                return Grant(f"session:{session}", read=[f"{SESSIONS}{session}/**"], session=session)
            except ZbusError as error:
                raise _unknown("token_refused", str(error), ', error="invalid_token"') from None
        raise _unknown("token_refused", "this server does not know the token", ', error="invalid_token"')


def _credential(scope: Scope) -> tuple[str | None, bool]:
    """The token of a request, and whether a browser sent it on its own account."""
    has_cookie = False
    for name, value in scope["headers"]:  # as it is: this is done for every request
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").partition(" ")
            if scheme.lower() != "bearer" or not token.strip():
                raise _unknown("token_refused", "Authorization is not of the form 'Bearer TOKEN'", "")
            return token.strip(), False
        has_cookie = has_cookie or name == b"cookie"
    if has_cookie and (cookie := HTTPConnection(scope).cookies.get(COOKIE)):
        return cookie, True
    # For EventSource and WebSocket in a browser, which can send no header; never for what changes something.
    if scope["query_string"] and (scope["type"] == "websocket" or scope["method"] in SAFE):
        return QueryParams(scope["query_string"]).get(QUERY), False
    return None, False


def _unknown(code: str, reason: str, more: str) -> Refusal:
    headers = {"WWW-Authenticate": f'Bearer realm="zbus"{more}'}
    return Refusal(401, code, reason, f"{_NOTHING_DONE}. Send 'Authorization: Bearer TOKEN'", headers)


def _digest(token: str) -> bytes:
    """Of one length for all, so that comparing does not tell how long a token is."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
