"""The settings of a bridge: two transports, keys, a direction and a log, validated before anything is opened."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from zbus.config import BusConfig, Contradiction, config_errors
from zbus.errors import ConfigInvalid, KeyInvalid
from zbus.keys import KeySet
from zbus.mesh.link import link_names
from zbus.util.renamed import renamed_to

RAW = ("nats", "zmq")  # transports that can carry messages without the zbus envelope, as "nats+raw" and "zmq+raw"


class BridgeConfig(BaseModel):
    """The settings of one bridge, or of one `[[bridge]]` table in a TOML file.

    >>> BridgeConfig(between=("nats://127.0.0.1:4222", "zenoh://127.0.0.1:7447"), keys=["shop/**"]).direction
    'both'
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    renamed_directions: ClassVar[Mapping[str, str]] = {"forth": "forward", "back": "reverse"}

    between: tuple[str, str] = Field(repr=False, description="URLs of the two transports")
    keys: tuple[str, ...] = Field(min_length=1, description="key expressions of the events to forward")
    direction: Literal["both", "forward", "reverse"] = Field(
        "both", description="'forward': only from the first transport to the second; 'reverse': only back"
    )
    raw: bool = Field(False, description="whether nats:// and zmq:// carry plain messages, without the zbus envelope")
    log: str | None = Field(
        None,
        min_length=1,
        description="path or URL of the log; without one, events are lost while a side is down",
    )
    name: str = Field("", description="name of the bridge in reports; empty: the two transports")
    mode: Literal["peer", "client", "router"] | None = Field(None, description="role of the zenoh side in its network")
    listen: tuple[str, ...] = Field(
        (), description="endpoints on which the zenoh side listens, such as tcp/127.0.0.1:7447"
    )
    connect: tuple[str, ...] = Field((), description="endpoints to which the zenoh side connects")

    retain_age_s: float | None = Field(
        None, gt=0, description="age in seconds above which events are removed from the log"
    )
    retain_bytes: int | None = Field(
        None, ge=1, description="size of the log file in bytes above which the oldest events are removed"
    )
    retain_events: int | None = Field(
        None, ge=1, description="number of events in the log above which the oldest are removed"
    )
    payload_bytes_max: int = Field(
        BusConfig.model_fields["payload_bytes_max"].default,
        ge=1,
        description="size in bytes above which a payload is not forwarded",
    )

    def __init__(self, **given: Any) -> None:
        with config_errors("bridge", known=type(self).model_fields):
            super().__init__(**given)

    @field_validator("direction", mode="before")
    @classmethod
    def _renamed(cls, value: object) -> object:
        if isinstance(value, str) and value in cls.renamed_directions:
            raise ValueError(f"{value} was {renamed_to(cls.renamed_directions[value])}")
        return value

    @field_validator("keys")
    @classmethod
    def _expressions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return KeySet(value).expressions
        except KeyInvalid as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        schemes = [url.partition("://")[0] for url in self.urls]
        if self.urls[0] == self.urls[1]:
            raise Contradiction("between", "must be two different transports")
        if self.raw and not any(scheme.endswith("+raw") for scheme in schemes):
            raise Contradiction("raw", f"only {' and '.join(RAW)} carry plain messages, and neither end is one of them")
        placed = bool(self.listen or self.connect)
        if placed and schemes.count("zenoh") != 1:
            field = "listen" if self.listen else "connect"
            raise Contradiction(field, "needs exactly one zenoh end")
        if "zenoh://" in self.urls and not placed:
            raise Contradiction("between", "zenoh:// has no address: write zenoh://host:port, or set listen or connect")
        if self.mode is not None and not placed:
            raise Contradiction("mode", "needs listen or connect; with only zenoh://host:port the bridge is a client")
        try:
            self.bus_config()
        except ConfigInvalid as error:
            raise Contradiction("between" if error.field == "transports" else error.field, error.reason) from None
        return self

    @property
    def urls(self) -> tuple[str, str]:
        """The URLs of the transports to open."""
        first, second = (self._url(each) for each in self.between)
        return first, second

    @property
    def labels(self) -> tuple[str, str]:
        """The names of the two transports, without secrets."""
        names = link_names(self.urls)
        return names[self.urls[0]], names[self.urls[1]]

    @property
    def title(self) -> str:
        """The `name`, or a name made of the two transports."""
        arrow = {"both": "<->", "forward": "->", "reverse": "<-"}[self.direction]
        return self.name or f"{self.labels[0]} {arrow} {self.labels[1]}"

    def bus_config(self) -> BusConfig:
        """Return the settings of the bridge's node: two transports, and a log that stores the forwarded events."""
        first, second = self.labels
        return BusConfig.exactly(
            transports=self.urls,
            receive_on={"both": (), "forward": (first,), "reverse": (second,)}[self.direction],
            log=self.log,
            keep=self.keys if self.log is not None else "own",
            mode=(self.mode or "peer") if self.listen or self.connect else "embedded",  # zenoh://host:port is a client
            listen=self.listen,
            connect=self.connect,
            retain_age_s=self.retain_age_s,
            retain_bytes=self.retain_bytes,
            retain_events=self.retain_events,
            payload_bytes_max=self.payload_bytes_max,
        )

    def _url(self, given: str) -> str:
        scheme, _, rest = given.partition("://")
        return f"{scheme}+raw://{rest}" if self.raw and scheme in RAW else f"{scheme}://{rest}"


def load_bridges(path: str | os.PathLike[str]) -> list[BridgeConfig]:
    """Load the bridges of a TOML file. Raises `ConfigInvalid` with the table and the field if one is wrong."""
    shown = os.fspath(path)
    try:
        found = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigInvalid("config", f"{shown}: {error}") from error
    tables = found.pop("bridge", None)
    if found:
        raise ConfigInvalid(
            "config", f"{shown}: {sorted(found)[0]!r} is unknown: the file may only contain [[bridge]] tables"
        )
    if not isinstance(tables, list) or not tables:
        raise ConfigInvalid("config", f"{shown}: the file has no [[bridge]] table")
    bridges = [_table(number, table) for number, table in enumerate(tables, 1)]
    for number, bridge in enumerate(bridges, 1):
        if bridge.log is not None and bridge.log in [other.log for other in bridges[: number - 1]]:
            raise ConfigInvalid(f"[[bridge]] {number}: log", "another bridge uses this log: each bridge needs its own")
    return bridges


def _table(number: int, table: Any) -> BridgeConfig:
    try:
        if not isinstance(table, dict):
            raise ConfigInvalid("bridge", "must be a [[bridge]] table")
        return BridgeConfig(**table)
    except ConfigInvalid as error:
        raise ConfigInvalid(f"[[bridge]] {number}: {error.field}", error.reason) from None
