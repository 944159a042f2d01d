"""Allow-lists for the Host and Origin headers of requests.

A page of another site can send requests to this server, and a host name that it points at this address (DNS
rebinding) makes them same-origin for the browser. So the Host of a request must be a name of this server, and its
Origin, if present, must be the same host or an allowed origin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from zbus.errors import ConfigInvalid
from zbus.util.memo import Memo
from zbus_web.http.http_errors import HttpError

if TYPE_CHECKING:
    from zbus_web.http.settings import WebSettings

LOCAL = ("localhost", "127.0.0.1", "[::1]")
ANY_ADDRESS = ("", "0.0.0.0", "::", "[::]")  # noqa: S104 - addresses to bind to, never Host names
KEPT_MAX = 1000  # Cached pairs of an allowed host and origin.
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}

Authority = tuple[str, int | None]  # a name in lower case, and a port


class Origins:
    """The allow-lists of one server. A name with a port allows only that port."""

    def __init__(self, settings: WebSettings) -> None:
        own = [] if settings.host in ANY_ADDRESS else [_bracketed(settings.host)]
        self._hosts = frozenset(_required(each) for each in (*LOCAL, *own, *settings.allowed_hosts))
        self._origins = frozenset(_normal(each) for each in settings.allowed_origins)
        self._allowed = Memo[tuple[str, str | None], None](KEPT_MAX, self._check)

    def check(self, host: str, origin: str | None) -> None:
        """Raise `HttpError` unless the Host is a name of this server and the Origin, if present, is allowed."""
        self._allowed[host, origin]

    def _check(self, named: tuple[str, str | None]) -> None:
        host, origin = named
        self._check_host(host)
        if origin is not None and not self._is_allowed(origin, host):
            raise HttpError(
                403,
                "origin_rejected",
                f"pages of {origin[:200]!r} may not send requests to this server",
                "Nothing was done. Add the origin to `allowed_origins` to allow it",
            )

    def _check_host(self, host: str) -> None:
        found = _authority(host)
        if found is None or not (found in self._hosts or (found[0], None) in self._hosts):
            raise HttpError(
                421,
                "host_rejected",
                f"this server does not accept the Host {host[:200]!r}",
                "Nothing was done. Use a known name of the server, or add this one to `allowed_hosts`",
            )

    def _is_allowed(self, origin: str, host: str) -> bool:
        found, ours = _split(origin), _authority(host)
        if found is None or ours is None:
            return False
        scheme, name, port = found
        if origin_text(scheme, name, port) in self._origins:
            return True
        # A proxy may terminate TLS, so the scheme is not compared. A missing port means the default of the scheme.
        return (name, port or _PORTS[scheme]) == (ours[0], ours[1] or _PORTS[scheme])


def origin_text(scheme: str, name: str, port: int | None) -> str:
    """Return an origin in the form that browsers send."""
    return f"{scheme}://{name}" if port in (None, _PORTS[scheme]) else f"{scheme}://{name}:{port}"


def _split(origin: str) -> tuple[str, str, int | None] | None:
    """Return scheme, name and port, or None if invalid. Pages without an origin send "null", which is invalid here."""
    scheme, found, rest = origin.partition("://")
    authority = _authority(rest) if found and scheme.lower() in _PORTS else None
    return None if authority is None else (scheme.lower(), *authority)


def _normal(origin: str) -> str:
    found = _split(origin)
    if found is None:
        raise ConfigInvalid("allowed_origins", f"{origin!r} is not an origin such as 'https://console.example.org'")
    return origin_text(*found)


def _authority(text: str) -> Authority | None:
    """Return name and port of `name`, `name:port`, `[::1]` or `[::1]:port`, or None if invalid."""
    try:
        parts = urlsplit(f"//{text}")
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name or parts.netloc != text or "@" in text or any(each.isspace() for each in text):
        return None
    return _bracketed(name.removesuffix(".")), port


def _required(host: str) -> Authority:
    found = _authority(_bracketed(host))
    if found is None:
        raise ConfigInvalid(
            "allowed_hosts", f"{host!r} is not a host name such as 'bus.example.org' or '10.0.0.7:8080'"
        )
    return found


def _bracketed(name: str) -> str:
    return f"[{name}]" if name.count(":") > 1 and not name.startswith("[") else name.lower()
