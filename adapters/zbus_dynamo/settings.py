"""Where ZMQ publishers listen and what they tell of it, from the URL, `options` and Dynamo's environment.

zmq                                      loopback, the store that Dynamo uses
zmq://0.0.0.0?advertise=10.1.2.3         every interface; others connect to the address advertised
zmq://?store=/run/dynamo                 another directory of discovery files
zmq://broker?xsub=tcp://a:1&xpub=tcp://a:2    through brokers; several are separated by `;`
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zbus.errors import ConfigInvalid

from .filestore import default_root

LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "*", "[::]")  # noqa: S104  recognised in order to refuse it without an address to tell
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]|\*")
_BROKER = re.compile(r"(tcp|ipc)://\S+")
_KNOWN = ("advertise", "store", "xsub", "xpub")


class ZmqSettings(NamedTuple):
    """How this process takes part. With brokers it listens nowhere and needs no discovery."""

    host: str
    advertise: str
    store: Path
    xsub: tuple[str, ...] = ()
    xpub: tuple[str, ...] = ()


def zmq_settings(url: str, options: Mapping[str, str]) -> ZmqSettings:
    """What a URL asks for; `ConfigInvalid` with the reason where it makes no sense."""
    host, _, query = url.partition("://")[2].partition("?")
    given = {name: value for name, value in options.items() if name in _KNOWN}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in _KNOWN:
            raise ConfigInvalid("transport", f"there is no {name!r} for zmq on the dynamo wire: {', '.join(_KNOWN)}")
        given[name] = value
    store = Path(given["store"]) if given.get("store") else default_root()
    xsub, xpub = _split(given.get("xsub", "")), _split(given.get("xpub", ""))
    if not (xsub or xpub) and not host:
        xsub, xpub = _from_environment()
    if xsub or xpub or host == "broker":
        return ZmqSettings("", "", store, *_checked(xsub, xpub))
    host = host.rstrip("/") or LOOPBACK
    if not _HOST.fullmatch(host):
        raise ConfigInvalid(
            "transport", "zmq on the dynamo wire takes a host without a port: publishers get a free one"
        )
    advertise = given.get("advertise") or host
    if advertise in _EVERYWHERE or not _HOST.fullmatch(advertise):
        raise ConfigInvalid("transport", "listening on every interface needs the address for others: ?advertise=HOST")
    return ZmqSettings("*" if host in _EVERYWHERE[:2] else host, advertise, store)


def _from_environment() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`DYN_ZMQ_BROKER_URL`, written `xsub=a;b , xpub=c;d`."""
    given = os.environ.get("DYN_ZMQ_BROKER_URL")
    if not given:
        if os.environ.get("DYN_ZMQ_BROKER_ENABLED", "").strip().lower() in ("1", "true", "yes", "on"):
            reason = "DYN_ZMQ_BROKER_ENABLED is not followed: name the brokers in DYN_ZMQ_BROKER_URL"
            raise ConfigInvalid("transport", reason)
        return (), ()
    parts = dict(part.strip().partition("=")[::2] for part in given.split(","))
    if set(parts) != {"xsub", "xpub"}:
        raise ConfigInvalid("transport", "DYN_ZMQ_BROKER_URL is written like 'xsub=tcp://a:1 , xpub=tcp://a:2'")
    return _checked(_split(parts["xsub"]), _split(parts["xpub"]))


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


def _checked(xsub: tuple[str, ...], xpub: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not xsub or not xpub:
        raise ConfigInvalid("transport", "a broker has two sides: xsub for publishers, and xpub for subscribers")
    for endpoint in (*xsub, *xpub):
        if not _BROKER.fullmatch(endpoint):
            raise ConfigInvalid("transport", "a broker's endpoint is written like tcp://127.0.0.1:5555")
    return xsub, xpub
