"""What a bridge is made of: two transports, keys, a direction, a log. All of it is checked before anything opens."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from zbus.config import BusConfig, Contradiction, config_errors
from zbus.errors import ConfigInvalid, KeyInvalid
from zbus.keys import KeySet
from zbus.mesh.link import link_names

RAW = ("nats", "zmq")  # what speaks to programs that know nothing of zbus, under the name with "+raw"


class BridgeConfig(BaseModel):
    """One bridge, and one `[[bridge]]` table of a file.

    >>> BridgeConfig(between=("nats://127.0.0.1:4222", "zenoh://127.0.0.1:7447"), keys=["shop/**"]).direction
    'both'
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    between: tuple[str, str] = Field(repr=False, description="the URLs of the two transports")
    keys: tuple[str, ...] = Field(min_length=1, description="expressions of what crosses")
    direction: Literal["both", "forward", "reverse"] = Field(
        "both", description="forward: from the first to the second only"
    )
    raw: bool = Field(False, description="nats:// and zmq:// carry plain messages of programs that know no envelope")
    log: str | None = Field(None, min_length=1, description="path of the log that makes the bridge durable")
    name: str = Field("", description="what the bridge is called in reports")
    mode: Literal["peer", "client", "router"] | None = Field(None, description="of the zenoh side")
    listen: tuple[str, ...] = Field((), description="where the zenoh side listens, such as tcp/127.0.0.1:7447")
    connect: tuple[str, ...] = Field((), description="what the zenoh side connects to")

    retain_age_s: float | None = Field(None, gt=0, description="remove events from the log that are older than this")
    retain_bytes: int | None = Field(None, ge=1, description="keep the log under this size")
    retain_events: int | None = Field(None, ge=1, description="keep this many events in the log at most")
    payload_bytes_max: int = Field(
        BusConfig.model_fields["payload_bytes_max"].default, ge=1, description="larger payloads do not cross"
    )

    def __init__(self, **given: Any) -> None:
        with config_errors("bridge", known=type(self).model_fields):
            super().__init__(**given)

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
            raise Contradiction("between", "both ends are the same transport: nothing would cross")
        if self.raw and not any(scheme.endswith("+raw") for scheme in schemes):
            raise Contradiction("raw", f"neither end can be raw: only {' and '.join(RAW)} carry plain messages")
        placed = bool(self.listen or self.connect)
        if placed and schemes.count("zenoh") != 1:
            field = "listen" if self.listen else "connect"
            raise Contradiction(field, "it is for the one end that is zenoh; here it is not clear which")
        if "zenoh://" in self.urls and not placed:
            raise Contradiction("between", "zenoh:// has no address: write zenoh://host:port, or set listen or connect")
        if self.mode is not None and not placed:
            raise Contradiction("mode", "it goes with listen or connect; zenoh://host:port alone is a client there")
        try:
            self.bus_config()
        except ConfigInvalid as error:
            raise Contradiction("between" if error.field == "transports" else error.field, error.reason) from None
        return self

    @property
    def urls(self) -> tuple[str, str]:
        """The two transports that are opened."""
        first, second = (self._url(each) for each in self.between)
        return first, second

    @property
    def labels(self) -> tuple[str, str]:
        """What the two are called, without secrets."""
        names = link_names(self.urls)
        return names[self.urls[0]], names[self.urls[1]]

    @property
    def title(self) -> str:
        """The name that was given, or the two ends."""
        arrow = {"both": "<->", "forward": "->", "reverse": "<-"}[self.direction]
        return self.name or f"{self.labels[0]} {arrow} {self.labels[1]}"

    def bus_config(self) -> BusConfig:
        """The node that a bridge is: two transports, and a log that records what crosses."""
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
    """The bridges of a TOML file, all of them checked; `ConfigInvalid` names the table and the field."""
    shown = os.fspath(path)
    try:
        found = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigInvalid("config", f"{shown}: {error}") from error
    tables = found.pop("bridge", None)
    if found:
        raise ConfigInvalid("config", f"{shown}: {sorted(found)[0]!r} is unknown: a file holds [[bridge]] tables only")
    if not isinstance(tables, list) or not tables:
        raise ConfigInvalid("config", f"{shown}: there is no [[bridge]] table in it")
    bridges = [_table(number, table) for number, table in enumerate(tables, 1)]
    for number, bridge in enumerate(bridges, 1):
        if bridge.log is not None and bridge.log in [other.log for other in bridges[: number - 1]]:
            raise ConfigInvalid(f"[[bridge]] {number}: log", "another bridge has this log: each needs its own")
    return bridges


def _table(number: int, table: Any) -> BridgeConfig:
    try:
        if not isinstance(table, dict):
            raise ConfigInvalid("bridge", "it is written as a [[bridge]] table")
        return BridgeConfig(**table)
    except ConfigInvalid as error:
        raise ConfigInvalid(f"[[bridge]] {number}: {error.field}", error.reason) from None
