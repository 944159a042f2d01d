"""Protocols: what the mesh needs from the node, and what its parts need from the network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any, Protocol

from zbus.event import Event
from zbus.ports.lineage import Branch, Mark
from zbus.ports.log import Log, Row, Stored
from zbus.wire.envelope import Envelope

from .buffered_events import BufferBudget
from .dedup import Arrival
from .gap_ledger import GapReporter
from .log_service import LogPage


class Delivers(Protocol):
    """Delivers events to the subscriptions of this node."""

    delivered: int  # every stored event up to this offset was delivered
    passed: set[tuple[int, int]]  # identities that are being stored and that live subscriptions must not get

    def unstored(self, events: Sequence[Event]) -> None:
        """Deliver events that the log of this node does not store."""


class Stores(Protocol):
    """Stores events in the log of this node."""

    def add_many(self, rows: Sequence[Row]) -> asyncio.Future[Stored]:
        """Store rows in one commit."""


class Backpressure(Protocol):
    """Makes publishers, and the events that are received, wait."""

    def block(self, reason: object, code: str, why: str) -> None:
        """Block publishers because of `reason`. The log record has `code` for programs, and `why` for people."""

    def unblock(self, reason: object) -> None:
        """Unblock the publishers that waited because of `reason`."""

    def applies(self, concerned: Callable[[Set[Any]], bool]) -> bool:
        """Return whether a reason concerns the caller."""

    async def wait(self, concerned: Callable[[Set[Any]], bool]) -> None:
        """Wait while a reason concerns the caller."""


class Host(Protocol):
    """The node, as the network sees it."""

    @property
    def log(self) -> Log | None:
        """The log of this node."""

    @property
    def run(self) -> Callable[..., asyncio.Future[Any]]:
        """`await run(call, *args)`: run a blocking call on a thread."""

    @property
    def count(self) -> Callable[[str, int], None]:
        """Add to a counter. May be called on any thread."""

    @property
    def dispatcher(self) -> Delivers:
        """Delivers received events."""

    @property
    def commits(self) -> Stores | None:
        """Stores received events; None without a log."""

    @property
    def backpressure(self) -> Backpressure:
        """Delays the events that are received."""


class Receives(Protocol):
    """The network, as the inbox sees it."""

    def beacon_received(self, origin: int, incarnation: int) -> None:
        """Note that a node sent a beacon, so it is alive."""

    def announcement_received(self, frame: bytes, link: str) -> None:
        """Register a node that announced itself. Raises `EventInvalid` if the frame is malformed."""

    def is_refused(self, origin: int, incarnation: int) -> bool:
        """Return whether a node was refused, because of the version of its protocol."""

    def request_cancelled(self, request_id: int) -> None:
        """Cancel a request whose requester no longer waits."""

    def forward_unstored(self, rows: Sequence[Row], link: str) -> None:
        """Forward events that the log does not store over the other links of a bridge."""

    def forward_when_stored(self, rows: Sequence[Row], link: str, storing: asyncio.Future[Stored]) -> None:
        """Track events that a bridge forwards once they are stored."""

    def is_copy(self, branch: Branch, offset: int, digest: bytes = b"") -> bool:
        """Return whether a frame that names the log of this node comes from a copy of it."""

    async def page(
        self,
        origin: int,
        after: int,
        from_ns: int,
        link: str,
        expressions: Sequence[str] | None = None,
        incarnation: int = 0,
        mark: Mark | None = None,
    ) -> LogPage:
        """Request a page of another node's log."""

    async def describe(self, origin: int, incarnation: int, link: str, known: Mapping[int, int]) -> LogPage:
        """Request a page without events of another node's log."""


class Announces(Protocol):
    """The network, as the node registry sees it."""

    @property
    def origin(self) -> int:
        """The id of the log that identifies this node."""

    @property
    def branch(self) -> Branch:
        """The incarnation of the log of this node."""

    @property
    def subscribed(self) -> Sequence[str]:
        """The key expressions that this node subscribes to."""

    @property
    def served(self) -> Sequence[str]:
        """The keys that this node serves requests for."""

    def endpoints(self) -> list[str]:
        """Return the addresses at which other nodes can reach this one."""

    def announce_frames(self, frames: Sequence[tuple[str, bytes]]) -> None:
        """Send frames that are not stored in the log."""


class PeerContext(GapReporter, Protocol):
    """The inbox, as a peer sees it."""

    @property
    def buffer_budget(self) -> BufferBudget:
        """Bounds the buffered events of all peers."""

    def accept(self, envelopes: Sequence[Envelope], link: str, repaired: bool = False) -> Awaitable[object] | None:
        """Deliver events, and store those that this node stores. The result completes when they are stored."""

    async def page(
        self,
        origin: int,
        after: int,
        from_ns: int,
        link: str,
        expressions: Sequence[str] | None = None,
        incarnation: int = 0,
        mark: Mark | None = None,
    ) -> LogPage:
        """Request a page of a log, which compares `mark` with its events. `link` is where its node was last seen."""

    async def describe(self, origin: int, incarnation: int, link: str, known: Mapping[int, int]) -> LogPage:
        """Request a page without events: how far the log reaches, and what it shares with `known` incarnations."""

    async def wait_for_capacity(self) -> None:
        """Wait while too many bytes await commit or, in a bridge, await sending."""

    def covered(self, origin: int, branch: Branch, offset: int) -> None:
        """Note that nothing of this log up to `offset` is missing, as the log has confirmed."""

    def marked(self, origin: int, mark: Mark, confirmed: bool) -> bool:
        """Return whether to compare a mark later. It is stored if the log itself has named it."""

    def split(self, origin: int, incarnation: int, before: int) -> None:
        """Note that an incarnation of a log has two histories, which are the same up to an offset."""

    def look_up(self, publisher_id: int, sequence: int) -> Arrival:
        """Return what is known of an identity."""

    def proven(self, origin: int, incarnation: int, shared: int) -> None:
        """Note that a log has replied, so that its incarnation exists.

        `shared` is the highest offset that it can have in common with what was known before.
        """

    def report_late(self, envelope: Envelope, link: str) -> None:
        """Report an event that is dropped, because later events of its publisher were delivered."""

    def report_rewound(self, origin: int, branch: Branch, known: int, shared: int) -> None:
        """Report that a log, known up to `known`, has the same events only up to `shared`."""

    def report_unconfirmed(self, origin: int, claimed: int, head: int, link: str) -> None:
        """Report that a position was claimed which the log, which ends at `head`, has not reached."""

    def past_fetched(self, origin: int, expression: str, reached: int | None) -> None:
        """Note how far the past events of an expression were fetched; None: all of them."""
