"""Where ZMQ publishers listen and which address they advertise, from the URL, `options` and Dynamo's environment.

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
from urllib.parse import urlsplit

from zbus.errors import ConfigInvalid
from zbus_zmq.address.options import BROKER_VARIABLE, ZmqOptions, from_url, read_broker_variable

from .filestore import default_root

LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "*", "[::]")  # noqa: S104  recognized so that `advertise` can be required
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]|\*")
_BROKER = re.compile(r"(tcp|ipc)://\S+")
_KNOWN = ("advertise", "store", "xsub", "xpub")
HIGH_WATER = 100_000  # the value of Dynamo
MESSAGE_SLACK_BYTES = 64 * 1024


class ZmqSettings(NamedTuple):
    """Settings of this process. With brokers it does not listen and needs no discovery."""

    host: str
    advertise: str
    store: Path
    xsub: tuple[str, ...] = ()
    xpub: tuple[str, ...] = ()

    def socket_options(self, payload_bytes_max: int) -> ZmqOptions:
        """Return the options of the sockets."""
        message_bytes_max = min(2 * payload_bytes_max + MESSAGE_SLACK_BYTES, (1 << 31) - 1)
        options = ZmqOptions(hwm=HIGH_WATER, max_message_bytes=message_bytes_max)
        if self.xsub:
            return options
        listening = {"bind": f"tcp://{self.host}:*", "advertise": f"tcp://{self.advertise}:{{port}}"}
        return options.model_copy(update=listening)


def zmq_settings(url: str, options: Mapping[str, str]) -> ZmqSettings:
    """Return the settings of a URL. Raises `ConfigInvalid` if they are malformed or contradict each other."""
    host = urlsplit(url if "://" in url else "").netloc
    named = from_url(url)
    for name in named.keys() - set(_KNOWN):
        raise ConfigInvalid(
            "transport", f"unknown option {name!r} for zmq on the dynamo wire; use one of {', '.join(_KNOWN)}"
        )
    given = {name: value for name, value in options.items() if name in _KNOWN} | named
    store = Path(given["store"]) if given.get("store") else default_root()
    xsub, xpub = _split(given.get("xsub", "")), _split(given.get("xpub", ""))
    if not (xsub or xpub) and not host:
        xsub, xpub = _from_environment()
    if xsub or xpub or host == "broker":
        return ZmqSettings("", "", store, *_checked(xsub, xpub))
    host = host or LOOPBACK
    if not _HOST.fullmatch(host):
        raise ConfigInvalid(
            "transport", "zmq on the dynamo wire takes a host without a port: publishers get a free one"
        )
    advertise = given.get("advertise") or host
    if advertise in _EVERYWHERE or not _HOST.fullmatch(advertise):
        raise ConfigInvalid("transport", "listening on every interface needs the address for others: ?advertise=HOST")
    if host in _EVERYWHERE:
        host = "[::]" if "[" in advertise else "*"
    return ZmqSettings(host, advertise, store)


def _from_environment() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the brokers of `DYN_ZMQ_BROKER_URL`, which is written `xsub=a;b , xpub=c;d`."""
    given = os.environ.get(BROKER_VARIABLE)
    if not given:
        if os.environ.get("DYN_ZMQ_BROKER_ENABLED", "").strip().lower() in ("1", "true", "yes", "on"):
            reason = "DYN_ZMQ_BROKER_ENABLED is not followed: name the brokers in DYN_ZMQ_BROKER_URL"
            raise ConfigInvalid("transport", reason)
        return (), ()
    parts = read_broker_variable(given)
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
