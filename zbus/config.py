"""The settings of a bus: arguments first, then `ZBUS_…` variables, then a TOML file, then defaults.

A setting under a retired name is an error that names the new one, wherever it is given: an argument, a variable or a
line of the file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict, SettingsError

from .errors import ConfigInvalid, KeyInvalid
from .keys import KeySet
from .util.renamed import renamed_to
from .util.session_token import SECRET_BYTES_MIN

_TRANSPORT = re.compile(r"[a-z][a-z0-9]*(\+[a-z]+)?(://\S*)?")
_NO_TRANSPORT = "must be a name such as 'zenoh', or a URL such as 'nats://127.0.0.1:4222'"
_ENDPOINT = re.compile(r"(tcp|udp|tls|ws|unixsock-stream)/\S+")
_ALL_KEYS = ("all", "any", "everything", "true", "yes", "*")  # what `keep` may be set to by mistake
_NEED_A_LOG = (
    "keep",
    "cold_dir",
    "read_only",
    "retain_age_s",
    "retain_bytes",
    "retain_events",
    "retain_keys_s",
    "dedup_s",
    "accept_loss",
    "cursor_ttl_s",
)


def _split(value: Any) -> Any:
    """Split the text of an environment variable at its commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _forever(value: Any) -> Any:
    """Return None for 'forever', because TOML has no null."""
    return None if value == "forever" else value


Age = Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_forever)]
Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class BusConfig(BaseSettings):
    """The settings of `zbus.open`. Each field is also `ZBUS_<FIELD>` in the environment, or a line of a TOML file.

    >>> BusConfig(log="app.db", durability="os").durability
    'os'
    """

    model_config = SettingsConfigDict(env_prefix="ZBUS_", extra="forbid", frozen=True, hide_input_in_errors=True)

    renamed: ClassVar[Mapping[str, str]] = {
        "record": "keep",
        "records": "system_events",
        "cold": "cold_dir",
        "check_schemas": "validate_schemas",
        "retain_past_cursors": "retain_ignore_cursors",
        "metrics": "latency_metrics",
    }

    log: str | None = Field(
        None,
        description="path or URL of the log: a SQLite file, such as app.db or sqlite://app.db; 'memory': a log that "
        "ends with the bus; another scheme: a log of an installed plugin; unset: no log",
    )
    cold_dir: str | None = Field(None, description="folder of the cold tier; unset: <log>-cold, if it exists")
    read_only: bool = Field(False, description="whether to only read the log, which another process may own")
    durability: Literal["fsync", "os"] = Field(
        "fsync",
        description="failures that a stored event survives: 'fsync' a power failure, 'os' only a crash of the process",
    )
    transport: str = Field(
        "zenoh", repr=False, description="name or URL of the transport, such as 'zenoh' or 'nats://127.0.0.1:4222'"
    )
    transports: Strings = Field(
        (),
        repr=False,
        description="URLs of several transports in place of `transport`, for moving nodes from one to another",
    )
    receive_on: Strings = Field((), description="names of those `transports` to receive on; empty: all")
    mode: Literal["embedded", "peer", "client", "router"] = Field(
        "embedded", description="role in a Zenoh network; 'embedded': no network"
    )
    listen: Strings = Field((), description="Zenoh endpoints to listen on, such as tcp/127.0.0.1:7447")
    connect: Strings = Field((), description="Zenoh endpoints to connect to")
    options: dict[str, str] = Field(
        {}, repr=False, description="transport-specific options; see docs/zenoh.md, docs/nats.md and docs/zmq.md"
    )
    keep: Literal["own"] | Strings = Field(
        "own",
        description="events that the log stores: 'own', or own events and those of other nodes on these keys",
    )
    wire: Literal["zbus", "dynamo"] = Field("zbus", description="format of the messages on the transport")
    node: str = Field("", max_length=200, description="name of this node; empty: host name and process id")
    bus: str = Field("main", max_length=200, description="name of this bus, such as telemetry or control")
    metadata: dict[str, str] = Field(
        {}, max_length=100, description="further properties of this node, announced to other nodes"
    )
    node_ttl_s: float = Field(
        15.0, gt=0, le=86_400, description="seconds without an announcement after which a node is considered gone"
    )
    latency_metrics: bool = Field(
        True, description="whether to record latency histograms; counters are always recorded"
    )
    system_events: Literal["off", "debug", "info", "warning"] = Field(
        "off", description="lowest level of the log records that are also published on the bus, under @zbus/record/"
    )
    tracing: Literal["auto", "on", "off"] = Field(
        "auto", description="OpenTelemetry spans; 'auto': on if the application has imported OpenTelemetry"
    )
    session_secret: SecretStr | None = Field(None, description="secret that signs session tokens")
    session_secret_file: str | None = Field(None, description="file that contains the session secret")
    payload_bytes_max: int = Field(
        8 * 1024 * 1024, ge=1, le=256 * 1024 * 1024, description="size limit of a payload in bytes"
    )
    pending_bytes_max: int = Field(
        64 * 1024 * 1024, ge=1024, description="bytes awaiting commit above which publishers wait"
    )
    close_timeout_s: float = Field(5.0, gt=0, le=300, description="time limit of aclose() in seconds")
    validate_schemas: bool = Field(True, description="whether to validate payloads against the registered schemas")
    skip_corrupt: bool = Field(False, description="whether reads skip stored events that fail their checksum")
    accept_loss: bool = Field(
        False, description="whether to open a damaged log; its missing offsets are never used again"
    )
    retain_age_s: float | None = Field(None, gt=0, description="age in seconds above which retention removes events")
    retain_keys_s: dict[str, Age] = Field(
        {},
        description="ages in seconds for events of some key expressions, in place of `retain_age_s`; the first "
        "expression that matches a key counts; null, or 'forever' in TOML: keep them, whatever their age",
    )
    retain_bytes: int | None = Field(
        None, ge=1, description="size of the log file in bytes above which retention removes the oldest events"
    )
    retain_events: int | None = Field(
        None, ge=1, description="number of events above which retention removes the oldest"
    )
    dedup_s: float = Field(
        604_800.0,
        ge=0,
        le=3_153_600_000,
        description="seconds for which the log recognizes a repeated event after retention has removed it",
    )
    retain_ignore_cursors: bool = Field(
        False, description="whether retention may remove events that a durable subscription has not acknowledged"
    )

    retain_remote_s: float = Field(
        86_400.0,
        ge=0,
        le=3_153_600_000,
        description="seconds for which retention waits for the durable subscriptions of a node that is not connected",
    )

    cursor_ttl_s: float | None = Field(
        None, gt=0, description="seconds without a subscriber after which a durable subscription expires; unset: never"
    )

    def __init__(self, **given: Any) -> None:
        check_variables("ZBUS_", self.renamed)
        with name_variables(given), config_errors("configuration", known=type(self).model_fields, renamed=self.renamed):
            super().__init__(**given)

    @classmethod
    def exactly(cls, **given: Any) -> Self:
        """Build a configuration from the arguments and the defaults only. Raises `ConfigInvalid` if one is wrong.

        It reads neither the environment nor a file. It is for the buses that zbus opens for its own use, because the
        `ZBUS_…` variables are about the application's bus and its log. It also takes microseconds, not milliseconds.

        >>> BusConfig.exactly(log="memory").log
        'memory'
        """
        config = cls.__new__(cls)
        with config_errors("configuration", known=cls.model_fields, renamed=cls.renamed):
            BaseModel.__init__(config, **given)  # validates; BaseSettings.__init__ would read the environment first
        return config

    @field_validator("log")
    @classmethod
    def _log_named(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("must not be an empty path; leave it out for a bus without a log")
        if value == ":memory:":
            raise ValueError('for a log in memory write zbus.open("memory")')
        return value

    @field_validator("cold_dir")
    @classmethod
    def _cold_dir_named(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("must not be an empty path; leave it out for the folder beside the log")
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
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise Contradiction("session_secret_file", f"{path}: {reason}") from None
        if given is not None and found != (given.get_secret_value() if isinstance(given, SecretStr) else given):
            raise Contradiction(
                "session_secret_file", "it contains another secret than session_secret: set one of the two"
            )
        return values | {"session_secret": found}

    @field_validator("session_secret")
    @classmethod
    def _secret_long(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value().encode()) < SECRET_BYTES_MIN:
            raise ValueError(f"must have at least {SECRET_BYTES_MIN} bytes; create one with: openssl rand -hex 32")
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

    @field_validator("keep", mode="before")
    @classmethod
    def _keep_meant(cls, value: object) -> object:
        """A single word would be a key, and '*' the keys of one segment: hardly what is meant."""
        if isinstance(value, str) and value != "own":
            if value.lower() == "own":
                raise ValueError("must be 'own', in lower case, or key expressions")
            if value.lower() in _ALL_KEYS:
                raise ValueError('for the events of other nodes on all keys write keep=["**"]')
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

    @field_validator("retain_keys_s")
    @classmethod
    def _retained_keys_named(cls, value: dict[str, float | None]) -> dict[str, float | None]:
        try:
            named = {KeySet([expression]).expressions[0]: age_s for expression, age_s in value.items()}
        except KeyInvalid as error:
            raise ValueError(str(error)) from error
        if len(named) < len(value):
            raise ValueError("has the same key expression twice")
        return named

    @field_validator("listen", "connect")
    @classmethod
    def _endpoints_named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for endpoint in value:
            if not _ENDPOINT.fullmatch(endpoint):
                raise ValueError("must be an endpoint such as tcp/127.0.0.1:7447")
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
            raise Contradiction("receive_on", f"{chosen[0]!r} is not one of `transports`")
        names = {each.partition("://")[0] for each in self.transports or (self.transport,)}
        if self.wire == "dynamo" and not names <= {"nats", "zmq"}:
            raise Contradiction("wire", "the dynamo wire needs the transport nats or zmq")
        if self.log is None:
            for field in _NEED_A_LOG:
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise Contradiction(field, "this setting needs a log: set log to a path")
        if self.read_only and self.keep != "own":
            raise Contradiction("keep", "a read-only log stores nothing")
        if self.log == "memory" and self.read_only:
            raise Contradiction("read_only", "a log in memory belongs to one bus and cannot be opened read-only")
        if self.log == "memory" and self.cold_dir is not None:
            raise Contradiction("cold_dir", "a log in memory has no cold tier")
        if self.read_only and self.mode != "embedded":
            raise Contradiction("mode", "a read-only bus must be embedded")
        return self

    @property
    def networked(self) -> bool:
        """Whether this bus can reach other nodes, through its mode or its transport."""
        return any(self.reaches_nodes(each) for each in self.transports or (self.transport,))

    def reaches_nodes(self, transport: str) -> bool:
        """Return whether this bus can reach other nodes through a transport."""
        return self.mode != "embedded" or transport not in ("zenoh", "zenoh://")

    def options_for(self, transport: str) -> dict[str, str]:
        """Return the options of one transport: an option `nats.user` applies only to nats, an option `user` to all.

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
    """Raised by a validator of a whole model to select the field that `ConfigInvalid` names."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


@contextmanager
def config_errors(
    whole: str = "",
    *,
    known: Iterable[str] = (),
    renamed: Mapping[str, str] | None = None,
    within: str = "",
    noun: str = "setting",
    prefix: str = "ZBUS_",
) -> Iterator[None]:
    """Raise the first problem of a pydantic `ValidationError` as `ConfigInvalid`, without the value: it may be secret.

    If a name is unknown, the error gives its new name from the table `renamed`, or else lists the `known` names; `noun`
    is the word for such a name. The field is `whole` if the problem is not in a single field, and follows `within`,
    such as a file's name, if that is given. Items of a list are counted from 1. `prefix` is that of the variables.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        cause = first.get("ctx", {}).get("error")
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            new = (renamed or {}).get(str(first["loc"][-1]))
            unknown = "; known are: ".join(filter(None, (f"there is no such {noun}", ", ".join(known))))
            reason = unknown if new is None else renamed_to(new)
        place = [part + 1 if isinstance(part, int) else part for part in first["loc"]]
        if isinstance(cause, Contradiction):
            place.append(cause.field)
        field = ".".join(map(str, place)) or whole
        raise ConfigInvalid(": ".join(filter(None, (within, field))), reason) from None
    except SettingsError as error:  # a variable that must contain JSON, and does not
        found = re.search(r'field "(\w+)"', str(error))
        field = f"{prefix}{found[1]}".upper() if found else whole
        raise ConfigInvalid(field, 'must be a JSON object, such as \'{"name": "value"}\'') from None


@contextmanager
def name_variables(given: Container[str]) -> Iterator[None]:
    """Make an error about a setting name its variable if the value comes from the environment, and not from `given`."""
    try:
        yield
    except ConfigInvalid as error:
        field, dot, rest = error.field.partition(".")
        variable = f"ZBUS_{field}".upper()
        if field in given or field not in BusConfig.model_fields or variable not in map(str.upper, os.environ):
            raise
        raise ConfigInvalid(variable + dot + rest, error.reason) from None


def check_variables(prefix: str, renamed: Mapping[str, str]) -> None:
    """Raise `ConfigInvalid` if a variable of the environment has a retired name: pydantic would ignore it."""
    found = {name.upper() for name in os.environ}
    for old, new in renamed.items():
        if (variable := f"{prefix}{old}".upper()) in found:
            raise ConfigInvalid(variable, renamed_to(f"{prefix}{new}".upper()))


def check_used(config: BusConfig, given: Iterable[str]) -> None:
    """Raise `ConfigInvalid` if one of the settings in `given`, which are arguments, has no effect.

    Variables and files may be shared by several programs, so a setting that comes from there may have no effect.
    """
    names = {each.partition("://")[0].partition("+")[0] for each in config.transports or (config.transport,)}
    for field in given:
        reason = ""
        if field in ("transport", "transports") and config.read_only and config.networked:
            reason = "a read-only bus opens no transport: leave it out, or open the bus without read_only=True"
        elif field in ("mode", "listen", "connect") and names == {"nats"} and config.mode != "embedded":
            reason = "it is for Zenoh, and this bus uses nats: leave it out, or set transport to 'zenoh'"
        elif field == "options" and not config.networked and config.options_for("zenoh"):
            reason = "this bus opens no connection: set transport or mode, or leave the options out"
        elif field == "keep" and config.keep != "own" and not config.networked:
            reason = "it is for events of other nodes, and this bus opens no connection: set transport or mode"
        if reason:
            raise ConfigInvalid(field, reason)


def load_config(path: str | os.PathLike[str] | None = None, **given: Any) -> BusConfig:
    """Build a `BusConfig` from the arguments, the environment, and a TOML file (`path`, or `ZBUS_CONFIG`).

    `DYN_EVENT_PLANE` selects the transport if no other source sets it.
    """
    return BusConfig(**_from_file(path) | given)


def load_only(*names: str, **given: Any) -> BusConfig:
    """Build a `BusConfig` from the arguments, and from the settings `names` of the environment and the TOML file.

    It is for a bus that a command opens for its own use: the other settings are about the application's bus, and may
    not even be valid together with those of the command.
    """
    renamed = {old: new for old, new in BusConfig.renamed.items() if new in names}
    check_variables("ZBUS_", renamed)
    with config_errors("configuration"):
        found = _from_file(None) | EnvSettingsSource(BusConfig)()
    with name_variables(given):
        return BusConfig.exactly(**{name: found[name] for name in (*names, *renamed) if name in found} | given)


def _from_file(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the settings of the file, except those that the environment sets too."""
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
