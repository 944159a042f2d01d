"""The configuration of a bus: arguments, then `ZBUS_…` variables, then a TOML file, then defaults."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict, SettingsError

from .errors import ConfigInvalid, KeyInvalid
from .keys import KeySet
from .util.session_token import SECRET_BYTES_MIN

_TRANSPORT = re.compile(r"[a-z][a-z0-9]*(\+[a-z]+)?(://\S*)?")
_NO_TRANSPORT = "a transport is a name such as 'zenoh', or a URL such as 'nats://127.0.0.1:4222'"
_ENDPOINT = re.compile(r"(tcp|udp|tls|ws|unixsock-stream)/\S+")
_NEED_A_LOG = ("keep", "cold_dir", "read_only", "retain_age_s", "retain_bytes", "retain_events", "accept_loss")


def _split(value: Any) -> Any:
    """A list in an environment variable is written with commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class BusConfig(BaseSettings):
    """What `zbus.open` opens. Each field is also `ZBUS_<FIELD>` in the environment, or a line of a TOML file.

    >>> BusConfig(log="app.db", durability="os").durability
    'os'
    """

    model_config = SettingsConfigDict(env_prefix="ZBUS_", extra="forbid", frozen=True, hide_input_in_errors=True)

    log: str | None = Field(None, description="path of the log, 'memory' for one that ends with the bus, or none")
    cold_dir: str | None = Field(None, description="folder of the cold tier; default: <log>-cold where there is one")
    read_only: bool = Field(False, description="read a log that another process owns")
    durability: Literal["fsync", "os"] = Field("fsync", description="'os' survives a crash, not a power cut")
    transport: str = Field("zenoh", repr=False, description="'zenoh', or the name or URL of another transport")
    transports: Strings = Field((), repr=False, description="several at once, while a fleet moves from one to another")
    receive_on: Strings = Field((), description="receive on these of them only, by name; default: on all")
    mode: Literal["embedded", "peer", "client", "router"] = Field("embedded", description="embedded: no network")
    listen: Strings = Field((), description="where to listen, such as tcp/127.0.0.1:7447")
    connect: Strings = Field((), description="which nodes to connect to")
    options: dict[str, str] = Field({}, repr=False, description="what the transport needs besides: see its page")
    keep: Literal["own"] | Strings = Field("own", description="'own', or expressions of what else the log keeps")
    wire: Literal["zbus", "dynamo"] = Field("zbus", description="the envelope on the wire")
    node: str = Field("", max_length=200, description="what this node is called; default: host and process")
    bus: str = Field("main", max_length=200, description="what this bus is for, such as telemetry or control")
    metadata: dict[str, str] = Field({}, max_length=100, description="what else others are told of this node")
    node_ttl_s: float = Field(15.0, gt=0, le=86_400, description="silent for so long, a node counts as gone")
    latency_metrics: bool = Field(True, description="measure latencies; counters are always kept")
    system_events: Literal["off", "debug", "info", "warning"] = Field(
        "off", description="which records are also published on the bus, under @zbus/record/"
    )
    tracing: Literal["auto", "on", "off"] = Field(
        "auto", description="spans by OpenTelemetry; 'auto': where the application has imported it"
    )
    session_secret: SecretStr | None = Field(None, description="what the tokens of sessions are signed with")
    session_secret_file: str | None = Field(None, description="a file that holds it, instead")
    payload_bytes_max: int = Field(8 * 1024 * 1024, ge=1, le=256 * 1024 * 1024)
    pending_bytes_max: int = Field(64 * 1024 * 1024, ge=1024, description="unwritten bytes before publishers wait")
    close_timeout_s: float = Field(5.0, gt=0, le=300, description="how long aclose() may take")
    validate_schemas: bool = Field(True, description="hold events to the schemas that are registered")
    skip_corrupt: bool = Field(False, description="go past stored events that fail their checksum")
    accept_loss: bool = Field(False, description="open a damaged log: its missing offsets are never used again")
    retain_age_s: float | None = Field(None, gt=0, description="remove events older than this")
    retain_bytes: int | None = Field(None, ge=1, description="keep the log file under this size")
    retain_events: int | None = Field(None, ge=1, description="keep this many events at most")
    retain_ignore_cursors: bool = Field(False, description="let retention pass durable cursors")

    def __init__(self, **given: Any) -> None:
        with config_errors("configuration", known=type(self).model_fields):
            super().__init__(**given)

    @classmethod
    def exactly(cls, **given: Any) -> Self:
        """Build a configuration from the arguments and the defaults only. Raises `ConfigInvalid` as usual.

        It reads neither the environment nor a file: for a bus that zbus opens for itself, because the `ZBUS_…`
        variables are about the application's bus and its log. It also takes microseconds, not milliseconds.

        >>> BusConfig.exactly(log="memory").log
        'memory'
        """
        config = cls.__new__(cls)
        with config_errors("configuration", known=cls.model_fields):
            BaseModel.__init__(config, **given)  # validates; BaseSettings.__init__ would read the environment first
        return config

    @field_validator("log")
    @classmethod
    def _log_named(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("an empty path names no log; leave it out for a bus without one")
        return value

    @field_validator("cold_dir")
    @classmethod
    def _cold_dir_named(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("an empty path names no folder; leave it out for the one beside the log")
        return value

    @model_validator(mode="before")
    @classmethod
    def _secret_read(cls, values: dict[str, Any]) -> dict[str, Any]:
        path, given = values.get("session_secret_file"), values.get("session_secret")
        if path is None:
            return values
        try:
            found = Path(path).read_text().strip()
        except (OSError, TypeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it holds no text"
            raise Contradiction("session_secret_file", f"{path}: {reason}") from None
        if given is not None and found != (given.get_secret_value() if isinstance(given, SecretStr) else given):
            raise Contradiction("session_secret_file", "it holds another secret than session_secret: name one of them")
        return values | {"session_secret": found}

    @field_validator("session_secret")
    @classmethod
    def _secret_long(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value().encode()) < SECRET_BYTES_MIN:
            raise ValueError(f"under {SECRET_BYTES_MIN} bytes it can be guessed; make one with: openssl rand -hex 32")
        return value

    @field_validator("transport", mode="before")
    @classmethod
    def _transport_named(cls, value: object) -> object:
        if isinstance(value, str) and not _TRANSPORT.fullmatch(value):
            raise ValueError(_NO_TRANSPORT)
        return value

    @field_validator("transports")
    @classmethod
    def _transports_named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_TRANSPORT.fullmatch(each) for each in value):
            raise ValueError(_NO_TRANSPORT)
        return value

    @field_validator("keep")
    @classmethod
    def _keep_named(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if value in ("own", ("own",)):
            return "own"
        try:
            return KeySet(value).expressions
        except KeyInvalid as error:
            raise ValueError(str(error)) from error

    @field_validator("listen", "connect")
    @classmethod
    def _endpoints_named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for endpoint in value:
            if not _ENDPOINT.fullmatch(endpoint):
                raise ValueError("an endpoint is written like tcp/127.0.0.1:7447")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> BusConfig:
        if self.mode == "embedded" and (self.listen or self.connect):
            field = "listen" if self.listen else "connect"
            raise Contradiction(field, "mode 'embedded' opens no socket; use mode 'peer', 'client' or 'router'")
        if self.mode == "client" and not self.connect:
            raise Contradiction("connect", "mode 'client' needs at least one endpoint to connect to")
        if self.mode in ("peer", "router") and not (self.listen or self.connect):
            raise Contradiction("listen", f"mode {self.mode!r} needs an endpoint to listen on or to connect to")
        chosen = [each for each in self.receive_on if not any(url.startswith(each) for url in self.transports)]
        if chosen:
            raise Contradiction("receive_on", f"{chosen[0]!r} is none of `transports`")
        names = {each.partition("://")[0] for each in self.transports or (self.transport,)}
        if self.wire == "dynamo" and not names <= {"nats", "zmq"}:
            raise Contradiction("wire", "the dynamo wire is spoken on nats and zmq")
        if self.log is None:
            for field in _NEED_A_LOG:
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise Contradiction(field, "there is no log: set log to a path")
        if self.read_only and self.keep != "own":
            raise Contradiction("keep", "a log that is only read records nothing")
        if self.log == "memory" and self.read_only:
            raise Contradiction("read_only", "a log in memory belongs to this bus alone")
        if self.log == "memory" and self.cold_dir is not None:
            raise Contradiction("cold_dir", "a log in memory ends with the bus, and has no cold tier")
        if self.read_only and self.mode != "embedded":
            raise Contradiction("mode", "a bus that is read-only is embedded")
        return self

    @property
    def networked(self) -> bool:
        """Whether other nodes can be reached, by the mode or by the transport."""
        return self.mode != "embedded" or any(
            each not in ("zenoh", "zenoh://") for each in self.transports or (self.transport,)
        )

    def options_for(self, transport: str) -> dict[str, str]:
        """The options of one transport: those named `nats.user` are for nats alone, those named `user` for any.

        >>> BusConfig(options={"nats.token": "x", "zmq.realm": "y", "lease_s": "3"}).options_for("nats")
        {'token': 'x', 'lease_s': '3'}
        """
        found = {}
        for name, value in self.options.items():
            whose, dot, rest = name.partition(".")
            if not dot or whose == transport:
                found[rest if dot else name] = value
        return found


class Contradiction(ValueError):
    """Raised by a validator of a whole model to name the field that `ConfigInvalid` shall name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


@contextmanager
def config_errors(
    whole: str = "", *, known: Iterable[str] = (), within: str = "", noun: str = "setting"
) -> Iterator[None]:
    """Raise the first problem of a pydantic `ValidationError` as `ConfigInvalid`, without the value: it may be secret.

    `known` are the names to list if one is unknown, and `noun` is what such a name is. The field is `whole` if the
    problem is in no single field, and follows `within`, such as a file's name, if that is given. Items of a list are
    counted from 1.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        cause = first.get("ctx", {}).get("error")
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "; known are: ".join(filter(None, (f"there is no such {noun}", ", ".join(known))))
        place = [part + 1 if isinstance(part, int) else part for part in first["loc"]]
        field = cause.field if isinstance(cause, Contradiction) else ".".join(map(str, place)) or whole
        raise ConfigInvalid(": ".join(filter(None, (within, field))), reason) from None
    except SettingsError as error:  # a variable that is to hold JSON, and does not
        raise ConfigInvalid(whole, str(error)) from None


def load_config(path: str | os.PathLike[str] | None = None, **given: Any) -> BusConfig:
    """Build a `BusConfig` from what is given, the environment, and a TOML file (`path`, or `ZBUS_CONFIG`).

    `DYN_EVENT_PLANE` names the transport where nothing else does.
    """
    return BusConfig(**_from_file(path) | given)


def load_only(*names: str, **given: Any) -> BusConfig:
    """Build a `BusConfig` from what is given; of the environment and the TOML file it takes only the settings `names`.

    For a bus that a command opens for itself: the other settings are about the application's bus, and may not even be
    valid together with those of the command.
    """
    with config_errors("configuration"):
        found = _from_file(None) | EnvSettingsSource(BusConfig)()
    return BusConfig.exactly(**{name: found[name] for name in names if name in found} | given)


def _from_file(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the settings of the file, without those that the environment sets too."""
    path = path or os.environ.get("ZBUS_CONFIG")
    values = _read_toml(path) if path else {}
    values.pop("web", None)  # the table of `zbus serve`
    if os.environ.get("DYN_EVENT_PLANE"):
        values.setdefault("transport", os.environ["DYN_EVENT_PLANE"])
    return {name: value for name, value in values.items() if f"ZBUS_{name.upper()}" not in os.environ}


def _read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigInvalid("config", f"{os.fspath(path)}: {error}") from error
