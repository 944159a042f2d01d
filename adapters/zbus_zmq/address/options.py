"""Options of a ZMQ fabric, from the URL first and then from `config.options`.

`zmq://` finds other nodes by a folder of this host; `zmq://broker?xsub=…&xpub=…` sends events through brokers. Options
in `config.options` may have the prefix `zmq.`; those with the prefix of another transport are ignored. Options contain
the paths of key files, never a key.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from zbus.config import BusConfig, config_errors
from zbus.errors import ConfigInvalid

BROKER_VARIABLE = "DYN_ZMQ_BROKER_URL"
_ENDPOINT = re.compile(r"tcp://[^\s/?#]+:(\d{1,5}|\*)")
_ANY_HOST = re.compile(r"tcp://(\*|0\.0\.0\.0|\[?::\]?):")


def _split(value: Any) -> Any:
    """Split the values of an option at semicolons."""
    return tuple(part.strip() for part in value.split(";") if part.strip()) if isinstance(value, str) else value


def _range(value: Any) -> Any:
    """Return the two ends of a range such as `20000-20100`."""
    if not isinstance(value, str):
        return value
    low, dash, high = value.partition("-")
    if not dash or not low.isdigit() or not high.isdigit():
        raise ValueError("a range of ports is written like 20000-20100")
    return int(low), int(high)


Model = TypeVar("Model", bound=BaseModel)
Strings = Annotated[tuple[str, ...], BeforeValidator(_split)]


class ZmqOptions(BaseModel):
    """Every option of `zmq://`, checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    discovery: Literal["file", "zenoh"] = Field("file", description="how nodes find each other: on one host, or across")
    registry: Path | None = Field(None, description="the folder of discovery=file; default: one private to the user")
    realm: str = Field("default", pattern=r"^[A-Za-z0-9_-]{1,64}$", description="nodes of other realms are not seen")
    lease_s: float = Field(
        10.0, ge=0.5, le=3600, description="seconds without a heartbeat after which a node is considered gone"
    )
    poll_s: float = Field(0.05, ge=0.005, le=0.1, description="how often the folder is looked at")
    zenoh_mode: Literal["peer", "client"] = "peer"
    zenoh_listen: Strings = Field((), description="endpoints of discovery=zenoh, such as tcp/127.0.0.1:7447")
    zenoh_connect: Strings = ()
    bind: str = Field("tcp://127.0.0.1:*", description="where to listen; a port there is the one for events")
    advertise: str | None = Field(None, description="where others reach us, such as tcp://10.0.0.5:{port}")
    ports: Annotated[tuple[int, int] | None, BeforeValidator(_range)] = Field(None, description="such as 20000-20100")
    xsub: Strings = Field((), description="where brokers take events")
    xpub: Strings = Field((), description="where brokers give events")
    hwm: int = Field(10_000, ge=1, le=1_000_000, description="messages in flight to one peer")
    max_message_bytes: int = Field(0, ge=0, le=2**31 - 1, description="0: what payload_bytes_max needs")
    stall_s: float = Field(
        1.0, ge=0, le=60, description="slow-subscriber timeout: seconds that a stalled subscriber may block the others"
    )
    settle_s: float = Field(0.5, ge=0, le=5, description="how long the first send waits for known nodes")
    linger_s: float = Field(1.0, ge=0, le=30, description="how long closing may take to send what is left")
    curve_secret: Path | None = Field(None, repr=False, description="the file with this node's secret key")
    curve_allow: Path | None = Field(None, description="a folder with the public keys that may talk to us")
    broker_key: Path | None = Field(None, description="the file with the brokers' public key")

    @field_validator("bind")
    @classmethod
    def _bind_named(cls, value: str) -> str:
        return check_endpoint(value)

    @field_validator("advertise")
    @classmethod
    def _advertise_named(cls, value: str | None) -> str | None:
        if value is not None:
            check_endpoint(value.replace("{port}", "1"))
        return value

    @field_validator("xsub", "xpub")
    @classmethod
    def _brokers_named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for endpoint in value:
            if check_endpoint(endpoint).endswith(":*"):
                raise ValueError("the address of a broker needs a port")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ZmqOptions:
        if bool(self.xsub) != bool(self.xpub):
            raise ValueError("brokers need both xsub and xpub")
        if self.ports is not None and not 1 <= self.ports[0] <= self.ports[1] <= 65535:
            raise ValueError("ports: a range of ports is written like 20000-20100")
        if self.ports is not None and not self.bind.endswith(":*"):
            raise ValueError("bind names a port and ports a range: choose one")
        if _ANY_HOST.match(self.bind) and self.advertise is None:
            raise ValueError("bind to every interface needs advertise, an address that others can reach")
        if self.curve_secret is not None and self.curve_allow is None:
            raise ValueError("curve_secret needs curve_allow: without it, any key would be accepted")
        if self.curve_secret is None and (self.curve_allow is not None or self.broker_key is not None):
            raise ValueError("curve_allow and broker_key need curve_secret")
        if self.curve_secret is not None and self.xsub and self.broker_key is None:
            raise ValueError("brokers with curve_secret need broker_key")
        return self

    @property
    def brokered(self) -> bool:
        """Whether events go through brokers."""
        return bool(self.xsub)


def read_options(config: BusConfig, url: str) -> ZmqOptions:
    """Return the options of a URL such as `zmq://?registry=/run/zbus`, completed from `config.options`."""
    given = config.options_for("zmq") | from_url(url)
    mode = urlsplit(url).netloc
    if mode not in ("", "direct", "broker"):
        raise ConfigInvalid("transport", "zmq:// is followed by nothing, by 'direct', or by 'broker', then options")
    if mode == "" and not {"xsub", "xpub"} & given.keys() and os.environ.get(BROKER_VARIABLE):
        given |= read_broker_variable(os.environ[BROKER_VARIABLE])
    if mode == "direct" and {"xsub", "xpub"} & given.keys():
        raise ConfigInvalid("transport", "zmq://direct does not accept xsub and xpub")
    if mode == "broker" and "xsub" not in given:
        given |= read_broker_variable(os.environ.get(BROKER_VARIABLE, ""))
    if config.mode != "embedded":
        given.setdefault("zenoh_listen", ";".join(config.listen))
        given.setdefault("zenoh_connect", ";".join(config.connect))
    given.setdefault("max_message_bytes", str(max(64 << 20, 2 * config.payload_bytes_max + (1 << 20))))
    return validated(ZmqOptions, given)


def validated(model: type[Model], given: dict[str, str]) -> Model:
    """Return the options as a model. Raises `ConfigInvalid`, which never contains the values."""
    with config_errors("transport", known=model.model_fields, noun="option"):
        return model.model_validate(given)


def from_url(url: str) -> dict[str, str]:
    """Return the options after the `?` of a URL."""
    parts = urlsplit(url if "://" in url else "")  # a bare name has no options
    if parts.path not in ("", "/") or parts.fragment:
        raise ConfigInvalid("transport", "this URL has no path: options follow a '?'")
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigInvalid("transport", "options are written like ?name=value&name=value") from None
    if len(dict(pairs)) != len(pairs):
        raise ConfigInvalid("transport", "an option is given twice")
    return dict(pairs)


def read_broker_variable(value: str) -> dict[str, str]:
    """Return the brokers in a text like `xsub=tcp://a:1;tcp://b:1 , xpub=tcp://a:2;tcp://b:2`."""
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in value.split(","))):
        name, _, endpoints = part.partition("=")
        if name.strip() not in ("xsub", "xpub") or not endpoints.strip():
            raise ConfigInvalid(BROKER_VARIABLE, "it is written like: xsub=tcp://a:1;tcp://b:1 , xpub=tcp://a:2")
        found[name.strip()] = endpoints.strip()
    if found.keys() != {"xsub", "xpub"}:
        raise ConfigInvalid("transport", f"brokers need xsub and xpub, in the URL or in {BROKER_VARIABLE}")
    return found


def check_endpoint(value: str) -> str:
    """Return the endpoint. Raises `ValueError` if it is malformed."""
    if not _ENDPOINT.fullmatch(value):
        raise ValueError("an endpoint is written like tcp://127.0.0.1:5555")
    return value
