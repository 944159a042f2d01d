"""Authentication: bearer tokens with key permissions, and signed session tokens.

If no token is configured, every client may do everything, because only this machine can reach the server. The keys
under `sessions/{id}/` are an exception: only a token signed for that session reads them, and such a token reads
nothing else.
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
_FOUND = "zbus.permissions"


class _Known(NamedTuple):
    digest: bytes
    permissions: Permissions


class Authenticator:
    """Finds the permissions of a request by `Authorization: Bearer`, the cookie `zbus_token` or `?access_token=`."""

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

    def permissions(self, connection: HTTPConnection) -> Permissions:
        """Return the permissions of a request, looked up once. Raises `HttpError` (401) if its token is not valid."""
        found = self.found(connection.scope)
        if isinstance(found, HttpError):
            raise found
        return found

    def found(self, scope: Scope) -> Permissions | HttpError:
        """Return the permissions of a request, or the error that `permissions` raises."""
        found: Permissions | HttpError | None = scope.get(_FOUND)
        if found is None:
            try:
                found = self._find(scope)
            except HttpError as error:
                found = error
            scope[_FOUND] = found
        return found

    def _find(self, scope: Scope) -> Permissions:
        token, by_cookie = _credential(scope)
        if token is None:
            if self._anonymous is None:
                raise _unauthorized("token_required", "this server requires a token", "")
            return self._anonymous
        if by_cookie and (scope["type"] == "websocket" or scope["method"] not in SAFE):
            # A browser sends the cookie with requests of any page; only the Origin shows which page it was.
            headers = Headers(scope=scope)
            if "origin" not in headers:
                raise HttpError(
                    403,
                    "origin_required",
                    "a request that changes something and authenticates with a cookie must have an Origin header",
                    NOTHING_DONE,
                )
            self._origins.check(", ".join(headers.getlist("host")), ", ".join(headers.getlist("origin")))
        return self._by_token(token)

    def _by_token(self, token: str) -> Permissions:
        given, found = _digest(token), None
        for known in self._tokens:  # Compare all of them, so that the duration reveals nothing.
            if hmac.compare_digest(known.digest, given):
                found = known.permissions
        if found is not None:
            return found
        if self._secret is not None:
            try:
                session = verify_session_token(self._secret, token)
                if "/" in session:
                    raise ZbusError("a session id must be one key segment")
                check_key(SESSIONS + session)
                return Permissions(
                    f"session:{session}", read=[f"{SESSIONS}{session}/**"], session=session, until=expires_at(token)
                )
            except ZbusError as error:
                raise _unauthorized("invalid_token", str(error), ', error="invalid_token"') from None
        raise _unauthorized("invalid_token", "this server does not know the token", ', error="invalid_token"')


def _credential(scope: Scope) -> tuple[str | None, bool]:
    """Return the token of a request, and whether it is a cookie, which a browser adds to every request."""
    has_cookie = False
    for name, value in scope["headers"]:  # Read from the raw list, because this runs for every request.
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").partition(" ")
            if scheme.lower() != "bearer" or not token.strip():
                raise _unauthorized("invalid_token", "Authorization must have the form 'Bearer TOKEN'", "")
            return token.strip(), False
        has_cookie = has_cookie or name == b"cookie"
    if has_cookie and (cookie := HTTPConnection(scope).cookies.get(COOKIE)):
        return cookie, True
    # EventSource and WebSocket cannot send headers in a browser. Requests that change something may not use this.
    if scope["query_string"] and (scope["type"] == "websocket" or scope["method"] in SAFE):
        return QueryParams(scope["query_string"]).get(QUERY), False
    return None, False


def _unauthorized(code: str, message: str, more: str) -> HttpError:
    headers = {"WWW-Authenticate": f'Bearer realm="zbus"{more}'}
    return HttpError(401, code, message, f"{NOTHING_DONE}. Send 'Authorization: Bearer TOKEN'", headers)


def _digest(token: str) -> bytes:
    """Return a digest of fixed length, so that a comparison does not reveal the length of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
