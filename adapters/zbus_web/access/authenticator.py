"""Who asks, and what they may do: bearer tokens with key permissions, and signed tokens of sessions.

Without a token configured everybody may do everything, as long as only this machine can ask. The keys under
`sessions/{id}/` are an exception to all of this: they are read with a token that was signed for that very session,
and with nothing else, and such a token opens nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, NamedTuple

from starlette.datastructures import Headers, QueryParams
from starlette.requests import HTTPConnection
from starlette.types import Scope

from zbus.errors import ZbusError
from zbus.keys import check_key
from zbus.util.session_token import expires_at, verify_session_token
from zbus_web.http.http_errors import HttpError

from .origins import Origins
from .permissions import NOTHING_DONE, SESSIONS, Permissions

if TYPE_CHECKING:
    from zbus_web.http.settings import WebSettings

__all__ = ["Authenticator", "Permissions"]

COOKIE = "zbus_token"
QUERY = "access_token"
SAFE = ("GET", "HEAD", "OPTIONS")
_FOUND = "zbus.grant"


class _Known(NamedTuple):
    digest: bytes
    grant: Permissions


class Authenticator:
    """Finds the grant of a request: by `Authorization: Bearer`, the cookie `zbus_token`, or `?access_token=`."""

    def __init__(self, settings: WebSettings, session_secret: bytes | None) -> None:
        self._secret = session_secret
        self._origins = Origins(settings)
        self._tokens = [
            _Known(
                _digest(each.secret()),
                Permissions(each.name, read=each.read, publish=each.publish, operate=each.operate),
            )
            for each in settings.tokens
        ]
        self._anonymous = None if self._tokens else Permissions("anonymous", read=None, publish=None, operate=True)

    def grant(self, connection: HTTPConnection) -> Permissions:
        """What this request may do; raises `HttpError` (401) where it is nobody's. Found out once for each request."""
        found = self.found(connection.scope)
        if isinstance(found, HttpError):
            raise found
        return found

    def found(self, scope: Scope) -> Permissions | HttpError:
        """The same, with the refusal as a value."""
        found: Permissions | HttpError | None = scope.get(_FOUND)
        if found is None:
            try:
                found = self._find(scope)
            except HttpError as refusal:
                found = refusal
            scope[_FOUND] = found
        return found

    def _find(self, scope: Scope) -> Permissions:
        token, by_cookie = _credential(scope)
        if token is None:
            if self._anonymous is None:
                raise _unknown("token_needed", "this server wants a token", "")
            return self._anonymous
        if by_cookie and (scope["type"] == "websocket" or scope["method"] not in SAFE):
            # A browser sends a cookie along with whatever any page asks for: without an origin nobody knows which.
            headers = Headers(scope=scope)
            if "origin" not in headers:
                raise HttpError(
                    403,
                    "origin_needed",
                    "a request with a cookie that changes something names its Origin",
                    NOTHING_DONE,
                )
            self._origins.check(", ".join(headers.getlist("host")), ", ".join(headers.getlist("origin")))
        return self._by_token(token)

    def _by_token(self, token: str) -> Permissions:
        given, found = _digest(token), None
        for known in self._tokens:  # all of them, so that the time it takes tells nothing
            if hmac.compare_digest(known.digest, given):
                found = known.grant
        if found is not None:
            return found
        if self._secret is not None:
            try:
                session = verify_session_token(self._secret, token)
                if "/" in session:
                    raise ZbusError("the id of a session is one segment of a key")
                check_key(SESSIONS + session)
                return Permissions(
                    f"session:{session}", read=[f"{SESSIONS}{session}/**"], session=session, until=expires_at(token)
                )
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


def _unknown(code: str, reason: str, more: str) -> HttpError:
    headers = {"WWW-Authenticate": f'Bearer realm="zbus"{more}'}
    return HttpError(401, code, reason, f"{NOTHING_DONE}. Send 'Authorization: Bearer TOKEN'", headers)


def _digest(token: str) -> bytes:
    """Of one length for all, so that comparing does not tell how long a token is."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
