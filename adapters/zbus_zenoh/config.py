"""Settings of a Zenoh session, without those defaults of Zenoh that open sockets unasked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import zenoh

from zbus.errors import ConfigInvalid

if TYPE_CHECKING:
    from zbus.config import BusConfig

# The names in `options` (or in the query of a URL), and the paths of these settings in Zenoh's configuration.
_OPTIONS = {
    "tls_ca": "transport/link/tls/root_ca_certificate",
    "tls_listen_cert": "transport/link/tls/listen_certificate",
    "tls_listen_key": "transport/link/tls/listen_private_key",
    "tls_cert": "transport/link/tls/connect_certificate",
    "tls_key": "transport/link/tls/connect_private_key",
    "tls_mutual": "transport/link/tls/enable_mtls",
    "tls_verify_name": "transport/link/tls/verify_name_on_connect",
    "user": "transport/auth/usrpwd/user",
    "password": "transport/auth/usrpwd/password",
    "users_file": "transport/auth/usrpwd/dictionary_file",
    "multicast": "scouting/multicast/enabled",
    "gossip": "scouting/gossip/enabled",
    "lease_ms": "transport/link/tx/lease",
}


def zenoh_config(config: BusConfig, url: str) -> tuple[zenoh.Config, bool]:
    """Return the session's settings, and whether it can reach other nodes.

    `zenoh://host:port` connects to that host as a client, unless `mode` is peer or router. Several hosts are separated
    by commas. Raises `ConfigInvalid` if an option is unknown or Zenoh rejects its value.
    """
    place, options = _read_url(url)
    mode, listen, connect = config.mode, list(config.listen), [*config.connect, *place]
    if place and url not in (config.transport, *config.transports):
        mode, listen, connect = "client", [], place  # not the URL that `mode` and `listen` were written for
    elif mode == "embedded" and connect:
        mode = "client"
    settings: dict[str, Any] = {
        "mode": "peer" if mode == "embedded" else mode,
        "listen/endpoints": listen,
        "connect/endpoints": connect,
        "connect/exit_on_failure": False,
        "connect/timeout_ms": -1 if mode != "client" else 5000,
        "connect/retry": {"period_init_ms": 100, "period_max_ms": 2000, "period_increase_factor": 2},
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "scouting/delay": 0,
        "transport/shared_memory/enabled": False,
    }
    for name, value in (config.options_for("zenoh") | options).items():
        if name not in _OPTIONS:
            raise ConfigInvalid("options", f"unknown option {name!r} of zenoh; use one of {', '.join(_OPTIONS)}")
        settings[_OPTIONS[name]] = json.loads(value) if value in ("true", "false") or value.isdigit() else value
    built = zenoh.Config()
    for path, value in settings.items():
        try:
            built.insert_json5(path, json.dumps(value))
        except zenoh.ZError as error:
            field = next((name for name, where in _OPTIONS.items() if where == path), path.partition("/")[0])
            reason = "zenoh rejects the value" if field in _OPTIONS else str(error)  # the value may be a secret
            raise ConfigInvalid(field, reason) from None
    return built, mode != "embedded"


def trust(settings: zenoh.Config) -> str:
    """Return how a session with these settings authenticates its peers: "mtls", "tls", "login", "none"."""
    get = settings.get_json
    tls = ["mtls"] if get(_OPTIONS["tls_mutual"]) == "true" else ["tls"] if get(_OPTIONS["tls_ca"]) != "null" else []
    login = ["login"] if any(get(_OPTIONS[name]) != "null" for name in ("user", "users_file")) else []
    return "+".join(tls + login) or "none"


def _read_url(url: str) -> tuple[list[str], dict[str, str]]:
    parts = urlsplit(url if "://" in url else "zenoh://")
    protocol = "tcp"
    options = dict(parse_qsl(parts.query))
    if "tls_ca" in options:
        protocol = "tls"
    if "@" in parts.netloc:
        raise ConfigInvalid("transport", "pass user and password as options, not in the URL")
    return [f"{protocol}/{host}" for host in parts.netloc.split(",") if host], options
