"""The options of a read, checked before anything is read: a misspelt option is an error, not a full scan."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from zbus.config import config_errors
from zbus.errors import ConfigInvalid, KeyInvalid
from zbus.keys import KeySet
from zbus.ports.log import Span

from .offsets import before

OFFSET_MAX = (1 << 62) - 1


class ReadOptions(BaseModel):
    """The options of `spark.read.format("zbus")`, in Spark's spelling: `startOffset`, `rowsPerPartition`, …

    >>> ReadOptions.parse({"path": "app.db", "key": "shop/** audit/*", "startOffset": "7"}).span
    Span(after=6, until=None, from_ns=None, to_ns=None)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)

    path: str
    key: tuple[str, ...] = ()  # empty: all keys, including system keys
    start_offset: int | None = Field(None, ge=0, le=OFFSET_MAX)  # the first offset to read
    end_offset: int | None = Field(None, ge=0, le=OFFSET_MAX)  # the last offset to read
    from_ns: int | None = Field(None, ge=0)
    to_ns: int | None = Field(None, ge=0)
    max_rows_per_batch: int | None = Field(None, ge=1)
    rows_per_partition: int = Field(250_000, ge=1)
    fail_on_data_loss: bool = True
    origin: int | None = None  # which log, if a URL leads to several
    raw: bool = False  # include the internal columns key_id, checksum and headers_raw
    timeout_s: float = Field(30.0, gt=0, le=3600)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Parse options as Spark passes them: names in any case, values as text. Raises `ConfigInvalid`."""
        names = {field.alias.lower(): field.alias for field in cls.model_fields.values() if field.alias}
        values: dict[str, Any] = {names.get(name.lower(), name): value for name, value in options.items()}
        for name, field in (("from", "fromNs"), ("to", "toNs")):
            if (time := values.pop(name, None)) is not None:
                if field in values:
                    raise ConfigInvalid(name, f"give {name!r} or {field!r}, not both")
                values[field] = _nanoseconds(name, time)
        if not values.get("path"):
            raise ConfigInvalid("path", 'name a log: .load("app.db"), or .load("zenoh://127.0.0.1:7447")')
        with config_errors("options", known=[*names.values(), "from", "to"], noun="option"):
            return cls(**values)

    @field_validator("key", mode="before")
    @classmethod
    def _expressions(cls, value: Any) -> Any:
        """Split expressions at spaces, which no key contains."""
        found = value.split() if isinstance(value, str) else value
        try:
            return KeySet(found).expressions
        except KeyInvalid as error:
            raise ValueError(str(error)) from error

    @field_validator("origin", mode="before")
    @classmethod
    def _hexadecimal(cls, value: Any) -> Any:
        return int(value, 16) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _in_order(self) -> ReadOptions:
        if self.start_offset and self.end_offset is not None and self.end_offset < before(self.start_offset):
            raise ValueError(f"endOffset {self.end_offset} comes before startOffset {self.start_offset}")
        return self

    @property
    def remote(self) -> bool:
        """Whether the log is read over a transport instead of from its file."""
        return "://" in self.path

    @property
    def keys(self) -> KeySet:
        """The keys to read."""
        return KeySet(self.key) if self.key else KeySet.all()

    @property
    def span(self) -> Span:
        """The offsets and times to read."""
        return Span(before(self.start_offset or 0), self.end_offset, self.from_ns, self.to_ns)


def _nanoseconds(name: str, text: str) -> int:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigInvalid(name, f"{text!r} is not an ISO time such as 2026-01-31T12:00:00Z") from error
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - datetime.fromtimestamp(0, UTC)
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000
