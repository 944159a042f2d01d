"""The node, as delivery sees it: the contract of this package with the rest of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from zbus.event import Event
from zbus.util.runtime import Runtime

from .dispatcher import Dispatcher
from .log_reader import LogReader

if TYPE_CHECKING:
    from zbus.observe.tracing import Tracing


class Backpressure(Protocol):
    """Lets a full subscription block the publishers of its keys."""

    def block(self, reason: object, code: str, why: str) -> None:
        """Block publishers because of `reason`. The record has `code` for programs, and `why` for people."""

    def unblock(self, reason: object) -> None:
        """Unblock the publishers that waited because of `reason`."""

    def progressed(self, reason: object) -> None:
        """Note that the subscription `reason` was read while it blocks publishers."""


class Validators(Protocol):
    """Validates events against the registered schemas when they are read."""

    def validate_received(self, event: Event) -> None:
        """Raise `SchemaInvalid` if a strict schema rejects the event."""


class Host(Protocol):
    """The node, as subscriptions and replays see it."""

    @property
    def dispatcher(self) -> Dispatcher:
        """Delivers live events."""

    @property
    def reader(self) -> LogReader:
        """Reads the log."""

    @property
    def backpressure(self) -> Backpressure:
        """Blocks publishers while a queue is full."""

    @property
    def validators(self) -> Validators | None:
        """The schemas to validate against; None if there are none."""

    @property
    def tracing(self) -> Tracing | None:
        """Makes spans; None if this bus does not trace."""

    @property
    def runtime(self) -> Runtime:
        """Clocks and randomness."""
