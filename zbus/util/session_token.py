"""Signed session tokens: a token gives access to the events of one session.

A token contains the session's id, its expiry time and an HMAC-SHA256 of both. It is not encrypted: anyone with the
token can read the id. It needs no escaping in a cookie, a header or a query:

    zs1.EXPIRES_AT_MS.ID.SIGNATURE

`zs1` is the version. It is signed too, so a token of a later version is never valid as this one.
"""

from __future__ import annotations

import hmac
import math
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable

from zbus.errors import ConfigInvalid, KeyInvalid, SessionTokenInvalid
from zbus.keys import check_key

from .runtime import REAL

SECRET_BYTES_MIN = 16
TOKEN_CHARACTERS_MAX = 2048
TTL_S_MAX = 10 * 366 * 86_400.0

_VERSION = "zs1"
_TOKEN = re.compile(r"zs1\.([1-9][0-9]{0,15})\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]{43})", re.ASCII)
_CONTEXT = b"zbus session token\0"  # the same secret may sign other data elsewhere


def check_session_id(session_id: str) -> str:
    """Return `session_id` if it is one segment of a key, and raise `KeyInvalid` with the reason if not.

    >>> check_session_id("Zoë-17")
    'Zoë-17'
    """
    check_key(session_id)
    if "/" in session_id:
        raise KeyInvalid(session_id, "a session's id is one segment of a key, without '/'")
    return session_id


def sign_session_token(
    secret: bytes, session_id: str, ttl_s: float, *, time_ns: Callable[[], int] = REAL.time_ns
) -> str:
    """Return a token for the events of one session, which is valid for `ttl_s` seconds.

    >>> verify_session_token(b"0123456789abcdef", sign_session_token(b"0123456789abcdef", "alice", 60))
    'alice'
    """
    _check_secret(secret)
    check_session_id(session_id)
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= TTL_S_MAX:
        raise ConfigInvalid("ttl_s", f"{ttl_s!r} must be a number of seconds above 0, and at most ten years")
    expires_at_ms = math.ceil(time_ns() / 1e6 + ttl_s * 1000)
    signed = f"{_VERSION}.{expires_at_ms}.{_text(session_id.encode())}"
    return f"{signed}.{_signature(secret, signed)}"


def verify_session_token(secret: bytes, token: str, *, time_ns: Callable[[], int] = REAL.time_ns) -> str:
    """Return the id of a token's session.

    Raises `SessionTokenInvalid` if the token is malformed, was changed, was signed with another secret, or has expired.
    """
    _check_secret(secret)
    found = _TOKEN.fullmatch(token) if isinstance(token, str) and len(token) <= TOKEN_CHARACTERS_MAX else None
    if found is None:
        raise SessionTokenInvalid("it is malformed")
    signed, _, signature = token.rpartition(".")
    if not hmac.compare_digest(_signature(secret, signed), signature):
        raise SessionTokenInvalid("it was changed, or signed with another secret")
    if int(found[1]) <= time_ns() / 1e6:
        raise SessionTokenInvalid("it has expired")
    return urlsafe_b64decode(found[2] + "=" * (-len(found[2]) % 4)).decode()


def expires_at(token: str) -> float:
    """Return the expiry time, in Unix seconds, of a token that `verify_session_token` has accepted."""
    return int(token.split(".")[1]) / 1000


def _check_secret(secret: bytes) -> None:
    if not isinstance(secret, bytes) or len(secret) < SECRET_BYTES_MIN:
        raise ConfigInvalid("session_secret", f"must be bytes, and at least {SECRET_BYTES_MIN} of them")


def _signature(secret: bytes, signed: str) -> str:
    return _text(hmac.digest(secret, _CONTEXT + signed.encode(), "sha256"))


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
