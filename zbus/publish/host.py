"""The protocols that connect publishing with the rest of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Protocol

from zbus.ports.log import Row


class Access(Protocol):
    """Decides which keys may be published to. No implementation exists yet."""

    def check_publish(self, key: str) -> None:
        """Raise a `ZbusError` if this key may not be published to."""


class Validators(Protocol):
    """Validates payloads against the registered schemas before an event is stored."""

    @property
    def validate(self) -> Callable[[str, bytes], None]:
        """`validate(key, body)`: raise `SchemaInvalid` if a strict schema rejects the payload."""


class Host(Protocol):
    """The node, as the publish path uses it."""

    def check_key(self, key: str) -> str:
        """Return a key that every transport in use can carry. Raises `KeyInvalid`."""

    def is_blocked(self, reasons: Set[Any], keys: Iterable[str]) -> bool:
        """Return whether one of the reasons for backpressure concerns a publisher of these keys."""

    def deliver_unlogged(self, rows: Sequence[Row]) -> bool:
        """Deliver events of one key that no log stores. Returns whether subscribers should run now."""
