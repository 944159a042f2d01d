"""What the mesh needs from the node, and what its parts need from the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

from zbus.event import Event
from zbus.ports.log import Log, Row, Stored

from .log_service import LogPage


class Delivers(Protocol):
    """Delivers events to the subscriptions of this node."""

    delivered: int  # every stored event up to this offset was delivered
    passed: set[tuple[int, int]]  # identities, soon stored, that live subscriptions had already or do not want

    def unstored(self, events: Sequence[Event]) -> None:
        """Deliver events that the log of this node does not store."""


class Stores(Protocol):
    """Stores events in the log of this node."""

    def add_many(self, rows: Sequence[Row]) -> asyncio.Future[Stored]:
        """Store rows in one commit."""


class Backpressure(Protocol):
    """Whether publishers, and so what is received, must wait."""

    def block(self, reason: object, code: str, why: str) -> None:
        """Block publishers because of `reason`. The record has `code` for programs, and `why` for people."""

    def unblock(self, reason: object) -> None:
        """Unblock the publishers that waited because of `reason`."""

    def applies(self, concerned: Callable[[Set[Any]], bool]) -> bool:
        """Return whether a reason concerns the caller."""

    async def wait(self, concerned: Callable[[Set[Any]], bool]) -> None:
        """Wait while a reason concerns the caller."""


class Host(Protocol):
    """What the network needs from the node."""

    @property
    def log(self) -> Log | None:
        """The log of this node."""

    @property
    def run(self) -> Callable[..., asyncio.Future[Any]]:
        """`await run(call, *args)`: run a blocking call on a thread."""

    @property
    def count(self) -> Callable[[str, int], None]:
        """Add to a counter. Any thread."""

    @property
    def dispatcher(self) -> Delivers:
        """Delivers received events."""

    @property
    def commits(self) -> Stores | None:
        """Stores received events; None without a log."""

    @property
    def backpressure(self) -> Backpressure:
        """Delays what is received."""


class Receives(Protocol):
    """What the inbox needs from the network."""

    def beacon_received(self, origin: int) -> None:
        """A node sent a beacon: it is alive."""

    def announcement_received(self, frame: bytes, link: str) -> None:
        """A node announced itself. Raises `EventInvalid` for a malformed frame."""

    def request_cancelled(self, request_id: int) -> None:
        """A requester no longer waits."""

    def forward_unstored(self, rows: Sequence[Row], link: str) -> None:
        """Forward events that no log stores over the other links of a bridge."""

    def forward_when_stored(self, rows: Sequence[Row], link: str, storing: asyncio.Future[Stored]) -> None:
        """Note events that are forwarded once they are stored."""

    async def page(
        self, origin: int, after: int, from_ns: int, link: str, expressions: Sequence[str] | None = None
    ) -> LogPage:
        """Request a page of another node's log."""


class Announces(Protocol):
    """What the node registry needs from the network."""

    @property
    def origin(self) -> int:
        """The log that identifies this node."""

    @property
    def subscribed(self) -> Sequence[str]:
        """The key expressions that this node subscribes to."""

    @property
    def served(self) -> Sequence[str]:
        """The keys that this node serves requests for."""

    def endpoints(self) -> list[str]:
        """Where other nodes can reach this one."""

    def announce_frames(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Send frames that no log stores."""
