"""Claims: how far the log of a peer reaches, as its beacons say, and how far the log itself has confirmed that.

A beacon is only a claim, and it may be forged. Events are delivered as they arrive, but the position of the peer is
stored only once its log has confirmed it. A claim that the log does not confirm is reported and forgotten, and the
events after the last confirmed position are requested again.

A process that was reverted to a snapshot of its machine is in the same incarnation, and may have reached the confirmed
position again with other events. At the first contact after a restart of this node, in each repair, and after a beacon
that names less than was known, the log therefore compares its events with the last known mark.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from zbus.errors import TransportError
from zbus.event import NUMBER_MAX
from zbus.mesh.host import PeerContext
from zbus.mesh.log_service import NOTHING_KNOWN, LogPage
from zbus.observe.records import EVENT_RETRY, record_reason
from zbus.ports.lineage import Branch, Mark, digest_number
from zbus.util.backoff import Backoff
from zbus.util.runtime import Runtime
from zbus.wire.beacon import Newest
from zbus.wire.envelope import Envelope

CONFIRM_S = (1.0, 60.0)  # the pauses before the log is asked to confirm a position; the longer ones after failures
UNCONFIRMED_MAX = 3  # how often the log must say that it does not reach a position
BELIEVED_MAX = 32  # beacons, as several links may repeat them
DOUBT_S = 2.0  # a contradiction leads to a repair at most this often
HEADS_KEPT = 100

Head = tuple[float, int]  # of a beacon, and when it came


class ClaimingPeer(Protocol):
    """A peer, as its claims see it."""

    id: int
    branch: Branch
    has_log: bool
    link: str

    @property
    def covered(self) -> int:
        """The offset up to which nothing is missing."""

    @property
    def is_repairing(self) -> bool:
        """Whether its log is being asked for missing events."""

    def is_missing(self, envelope: Envelope) -> bool:
        """Return whether an event of a page did not arrive, although this node wants it."""

    def ask(self) -> None:
        """Request the missing events from its log."""

    def confirmed_up_to(self, offset: int) -> None:
        """Note that the log has confirmed a position."""

    def go_back(self, offset: int | None) -> None:
        """Forget everything after a confirmed position, and request it again."""


class Claims:
    """The claims of one peer. Lives on the loop."""

    def __init__(
        self,
        peer: ClaimingPeer,
        context: PeerContext,
        runtime: Runtime,
        confirmed: int | None,
        known: Mapping[int, int],
        mark: Mark | None = None,
    ) -> None:
        self._peer, self._context = peer, context
        self._runtime, self._monotonic = runtime, runtime.monotonic
        self.confirmed = confirmed  # its log has confirmed that it reaches this offset; None for a new peer
        self.known = known  # other incarnations that are not compared yet, with the offsets that were reached
        self._claimed = 0  # how far its log reaches, as beacons say
        self._believed: deque[int] = deque(maxlen=BELIEVED_MAX)  # the heads of the last beacons
        self._heads: deque[Head] = deque(maxlen=HEADS_KEPT)  # of the beacons during a repair
        self.is_proven = False  # the log has replied
        self._doubted_at = -math.inf
        self._mark = mark  # the last one that its log has named
        self._is_compared = mark is None  # with the log, since the last pause
        self._compared_at = -math.inf
        self._confirming: asyncio.Task[None] | None = None
        self.seen_again = asyncio.Event()

    # Beacons.

    def is_believed(self, head: int) -> bool:
        """Return whether a beacon with this head was believed, so that the next one follows it."""
        return head in self._believed

    def believe(self, head: int, digest: bytes) -> None:
        """Note a beacon whose events arrived. That its log reaches `head`, the log must confirm."""
        self._claimed = max(head, self._claimed)
        self._believed.append(head)
        if digest and self._is_compared:
            self._keep(Mark(self._peer.branch.id, head, digest_number(digest)), confirmed=False)

    def advanced(self, covered: int) -> None:
        """Note that nothing up to an offset is missing. The log is asked whether it reaches it, unless it said so."""
        if self.confirmed is not None and max(covered, self._claimed) <= self.confirmed:
            self._context.covered(self._peer.id, self._peer.branch, covered)
        elif self._peer.has_log and self._confirming is None:
            self._confirming = asyncio.get_running_loop().create_task(self._confirm())

    def not_advanced(self, head: int) -> None:
        """Note a beacon that names nothing new. If it names less than was known, the log may have been reverted."""
        if self._mark is not None and head < self._mark.offset and self.may_be_reverted(head):
            self._peer.ask()

    def may_be_reverted(self, offset: int) -> bool:
        """Return whether the log must compare its mark, because a new event or a head is not above it."""
        compared_s = self._monotonic() - self._compared_at
        return self._mark is not None and offset <= self._mark.offset and compared_s >= DOUBT_S

    def doubt(self) -> None:
        """Forget everything that the log has not confirmed, because a claim contradicts an event."""
        now = self._monotonic()
        if now - self._doubted_at < DOUBT_S:
            return
        self._doubted_at, self._claimed = now, 0
        self._peer.go_back(self.confirmed)

    # Beacons during a repair.

    def repair_begins(self) -> None:
        """Forget what was claimed: the pages will show it."""
        self._claimed = 0
        self._heads.clear()
        self._is_compared = self._mark is None

    def note_head(self, head: int) -> None:
        """Keep the head of a beacon that came during a repair."""
        self._heads.append((self._monotonic(), head))

    @property
    def heads(self) -> list[Head]:
        """The heads of the beacons during the repair."""
        return list(self._heads)

    def compare_heads(self, heads: Sequence[Head], page: LogPage, link: str) -> None:
        """Report and forget heads that the log of a page does not reach. `heads` are those from before the request."""
        if false := [each for each in heads if each[1] > page.head and each in self._heads]:
            self._context.report_unconfirmed(self._peer.id, max(head for _, head in false), page.head, link)
            self._heads = deque((each for each in self._heads if each not in false), HEADS_KEPT)

    def settled_up_to(self, given_up: int, fresh: Mapping[str, Newest], last: Iterable[int], quiet_s: float) -> int:
        """Return the offset up to which every event arrived or was reported, after a repair was given up.

        Beacons named the events up to it. Later ones may still be in flight, whatever has overtaken them, and so may
        those in `fresh`. `last` has the last offset of each key.
        """
        before = self._monotonic() - quiet_s
        first = min([offset for offset, _, _ in fresh.values()], default=NUMBER_MAX)
        heads = [head for at, head in self._heads if at <= before and head < first]
        return max([given_up, *(heads or last)])

    # Replies of the log.

    def replied(self, page: LogPage, shared: int = NUMBER_MAX) -> LogPage:
        """Note that the log has replied, and shares at most this offset with what is known.

        Raises `TransportError` if it is in another incarnation.
        """
        peer = self._peer
        if page.branch.id not in (0, peer.branch.id):
            raise TransportError(f"log {peer.id:x} is in incarnation {page.branch.id:x}, not {peer.branch.id:x}")
        if not self.is_proven:
            self.is_proven = True
            self._context.proven(peer.id, peer.branch.id, shared)
        if self._is_compared and page.mark.incarnation == peer.branch.id:
            self._keep(page.mark, confirmed=True)
        return page

    def is_shorter(self, page: LogPage) -> bool:
        """Return whether the log ends before the position that it has confirmed, and go back to its end if it does."""
        known = self.confirmed or 0
        if page.head >= known:
            return False
        self._context.report_rewound(self._peer.id, self._peer.branch, known, page.head)
        self.confirmed = page.head
        return True

    def _keep(self, mark: Mark, confirmed: bool) -> None:
        if mark.digest and self._context.marked(self._peer.id, mark, confirmed):
            self._mark = mark

    @property
    def mark(self) -> Mark | None:
        """The mark that the log must compare with its events; None if it did since the repair began."""
        return None if self._is_compared else self._mark

    def compared(self, page: LogPage) -> int | None:
        """Note what the log replied to the mark. If it has other events, return where they may begin to differ."""
        mark, peer, shared = self._mark, self._peer, page.differs_after
        self._is_compared, self._compared_at = True, self._monotonic()
        if mark is None or shared is None:
            self.replied(page)  # its mark replaces the one that was compared
            return None
        self._mark = None
        self._context.split(peer.id, mark.incarnation, shared)
        if mark.incarnation == peer.branch.id or mark.offset <= peer.branch.before:  # otherwise its branch has shown it
            self._context.report_rewound(peer.id, peer.branch, max(mark.offset, self.confirmed or 0), shared)
        if self.confirmed is not None:
            self.confirmed = min(self.confirmed, shared)
        return shared

    async def compare(self) -> tuple[LogPage, bool]:
        """Ask the log for the offset that it shares with the known incarnations. Returns whether any was known.

        `confirmed` is that offset afterwards.
        """
        known, peer = self.known, self._peer
        page = await self._context.describe(peer.id, peer.branch.id, peer.link, known)
        self.replied(page, (page.shared or 0) if known else NUMBER_MAX)
        if known:
            self.known, most = NOTHING_KNOWN, max(known.values())
            self.confirmed = shared = None if page.shared is None else min(page.shared, most)
            if (shared is None or shared < most) and most <= peer.branch.before:  # otherwise it is reported already
                self._context.report_rewound(peer.id, peer.branch, most, shared or 0)
        return page, bool(known)

    async def _confirm(self) -> None:
        """Ask the log whether it reaches the position that was claimed, until it has said so.

        It is also asked for the events after the last one that a beacon named. If there are any, they are missing.
        """
        pauses, refused, failed = Backoff(*CONFIRM_S, jitter=0, uniform=self._runtime.uniform), 0, False
        peer, context = self._peer, self._context
        try:
            while self._is_unconfirmed():
                await self._pause(pauses.next(), until_seen=failed)
                if not self._is_unconfirmed():
                    continue  # a repair has, or will
                covered, claimed = peer.covered, max(peer.covered, self._claimed)
                try:
                    if claimed > covered:
                        page = await context.page(peer.id, covered, 0, peer.link, incarnation=peer.branch.id)
                    else:
                        page = await context.describe(peer.id, peer.branch.id, peer.link, NOTHING_KNOWN)
                    self.replied(page)
                except Exception as error:  # it is asked again; until then the position is not stored
                    record_reason(EVENT_RETRY, logging.DEBUG, code="confirm_failed", reason=str(error), origin=peer.id)
                    failed = True
                    continue
                failed = False
                pauses.reset()
                if not self._is_unconfirmed():
                    continue
                if any(peer.is_missing(each) for each in page.envelopes if each.offset <= claimed):
                    peer.ask()
                elif page.head >= claimed:
                    refused = 0
                    self.confirmed = min(claimed, page.covered)
                    peer.confirmed_up_to(self.confirmed)
                    context.covered(peer.id, peer.branch, self.confirmed)
                elif (refused := refused + 1) >= UNCONFIRMED_MAX:
                    self._refuse(claimed, page.head)
        finally:
            self._confirming = None

    async def _pause(self, pause_s: float, until_seen: bool) -> None:
        """Wait, but after a failure at most until the peer is seen again, and then for the shortest pause.

        After the longest pause, wait until then: a node that is gone is not asked any more.
        """
        if until_seen and pause_s > CONFIRM_S[0]:
            self.seen_again.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if pause_s >= CONFIRM_S[1] else pause_s):
                    await self.seen_again.wait()
            pause_s = CONFIRM_S[0]
        await asyncio.sleep(pause_s)

    def _is_unconfirmed(self) -> bool:
        claimed = max(self._peer.covered, self._claimed)
        return not self._peer.is_repairing and claimed > (-1 if self.confirmed is None else self.confirmed)

    def _refuse(self, claimed: int, head: int) -> None:
        """Forget a position that the log has not reached."""
        peer = self._peer
        if self.confirmed is not None and head < self.confirmed:  # only version 0.1 does not name its incarnation
            self._context.report_rewound(peer.id, peer.branch, self.confirmed, head)
            self.confirmed = head
        else:
            self._context.report_unconfirmed(peer.id, claimed, head, peer.link)
        self._doubted_at, self._mark = -math.inf, None
        self.doubt()

    def close(self) -> list[asyncio.Task[None]]:
        """Stop. Return the tasks to wait for."""
        ending = [self._confirming] if self._confirming is not None else []
        for task in ending:
            task.cancel()
        return ending
