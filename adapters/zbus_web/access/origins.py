"""Which hosts and origins a request may name.

A page of another site that a browser shows can send requests here, and a name of its own that it points at this
address (DNS rebinding) makes them look like its own. So the Host of a request must be one that we go by, and its
Origin, where there is one, the same host or one that is allowed by name.
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
ANY_ADDRESS = ("", "0.0.0.0", "::", "[::]")  # noqa: S104 - what is not a name of ours, however we are bound
KEPT_MAX = 1000  # pairs of host and origin that are remembered as allowed
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}

Authority = tuple[str, int | None]  # a name in lower case, and a port


class Origins:
    """The allow-lists of one server. Names may come with a port, which is then the only one."""

    def __init__(self, settings: WebSettings) -> None:
        own = [] if settings.host in ANY_ADDRESS else [_bracketed(settings.host)]
        self._hosts = frozenset(_required(each) for each in (*LOCAL, *own, *settings.allowed_hosts))
        self._origins = frozenset(_normal(each) for each in settings.allowed_origins)
        self._allowed = Memo[tuple[str, str | None], None](KEPT_MAX, self._check)

    def check(self, host: str, origin: str | None) -> None:
        """Raise a `HttpError` unless the Host is ours, and the Origin (if there is one) may come here."""
        self._allowed[host, origin]

    def _check(self, asked: tuple[str, str | None]) -> None:
        host, origin = asked
        self._check_host(host)
        if origin is not None and not self._may_come(origin, host):
            raise HttpError(
                403,
                "origin_refused",
                f"pages of {origin[:200]!r} may not use this server",
                "Nothing was done. Name the origin in `allowed_origins` if they should",
            )

    def _check_host(self, host: str) -> None:
        found = _authority(host)
        if found is None or not (found in self._hosts or (found[0], None) in self._hosts):
            raise HttpError(
                421,
                "host_refused",
                f"this server does not go by the name {host[:200]!r}",
                "Nothing was done. Use a name that it goes by, or add this one to `allowed_hosts`",
            )

    def _may_come(self, origin: str, host: str) -> bool:
        found, ours = _split(origin), _authority(host)
        if found is None or ours is None:
            return False
        scheme, name, port = found
        if origin_text(scheme, name, port) in self._origins:
            return True
        # TLS may end before us, so the scheme is not compared; a port that is not named is that of the scheme.
        return (name, port or _PORTS[scheme]) == (ours[0], ours[1] or _PORTS[scheme])


def origin_text(scheme: str, name: str, port: int | None) -> str:
    """An origin as browsers write it."""
    return f"{scheme}://{name}" if port in (None, _PORTS[scheme]) else f"{scheme}://{name}:{port}"


def _split(origin: str) -> tuple[str, str, int | None] | None:
    """Scheme, name and port; None for anything else, also for "null", as pages without an origin say."""
    scheme, found, rest = origin.partition("://")
    authority = _authority(rest) if found and scheme.lower() in _PORTS else None
    return None if authority is None else (scheme.lower(), *authority)


def _normal(origin: str) -> str:
    found = _split(origin)
    if found is None:
        raise ConfigInvalid("allowed_origins", f"{origin!r} is no origin, such as 'https://console.example.org'")
    return origin_text(*found)


def _authority(text: str) -> Authority | None:
    """Name and port of `name`, `name:port`, `[::1]`, `[::1]:port`; None for anything else."""
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
            "allowed_hosts", f"{host!r} is no name of a host, such as 'bus.example.org' or '10.0.0.7:8080'"
        )
    return found


def _bracketed(name: str) -> str:
    return f"[{name}]" if name.count(":") > 1 and not name.startswith("[") else name.lower()
