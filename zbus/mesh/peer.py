"""A peer: another node as this one sees it, with what it sent, what is missing, and the repair of gaps.

Each event names the event before it on its key, and beacons name the position that the peer has reached, so a gap is
detected with the next beacon at the latest. The peer's later events are then buffered, and the events after the last
offset up to which nothing is missing are requested from its log, page by page. After that, the buffered events are
delivered: nothing is out of order, and nothing is delivered twice. Events that cannot be requested are reported as a
gap. The gap is permanent and delivery resumes; or, for keys that this node stores, the gap stays open until the peer
is back.

A beacon is only a claim. Events are delivered as they arrive, and only those that are known by identity are duplicates;
but the position of the peer is stored only once its log has confirmed it. A claim that the log does not confirm is
reported and forgotten, and the events after the last confirmed position are requested again.

Each incarnation of a log is a peer of its own, so two copies of one log are never mixed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from types import MappingProxyType
from typing import Any, Protocol

from zbus.errors import RequestError, TransportError, ZbusError
from zbus.event import NUMBER_MAX
from zbus.observe.records import (
    EVENT_GAP,
    EVENT_REPLAY_DELIVERED,
    EVENT_REPLAY_FAILED,
    EVENT_REPLAY_REQUESTED,
    EVENT_RETRY,
    record,
    record_reason,
)
from zbus.ports.lineage import NO_BRANCH, Branch
from zbus.util.backoff import Backoff
from zbus.util.runtime import Runtime
from zbus.wire.beacon import Beacon, Newest
from zbus.wire.envelope import Envelope

from .dedup import Arrival
from .gap_ledger import GapLedger, GapReporter, TrimmedRanges
from .interest import NEVER
from .log_service import NOTHING_KNOWN, LogPage

BUFFERED_EVENTS_MAX = 8192
BUFFERED_BYTES_MAX = 16 * 1024 * 1024
CONFIRM_S = (1.0, 5.0)  # the pauses before the log is asked to confirm a position; the longer ones after failures
UNCONFIRMED_MAX = 3  # how often the log must say that it does not reach a position
BELIEVED_MAX = 32  # beacons, as several links may repeat them
DOUBT_S = 2.0  # a contradiction leads to a repair at most this often
TAIL_S = 0.25  # how long the last events that a beacon names may still be in flight
TAIL_TURNS_MAX = 20  # how often that time is extended while other events keep arriving
GIVE_UP_S = 10.0
RETRY_S = (0.05, 2.0)
KEYS_MAX = 100_000  # whose last offsets are kept between two beacons
HEADS_KEPT = 100
EMPTY_PAGE_S = 0.01  # the pause after a page without events, if more follow


NOTHING_OWED: Mapping[str, int] = MappingProxyType({})


class PeerContext(GapReporter, Protocol):
    """The node, as a peer sees it."""

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
    ) -> LogPage:
        """Request a page of a log. `link` is where its node was last seen."""

    async def describe(self, origin: int, incarnation: int, link: str, known: Mapping[int, int]) -> LogPage:
        """Request a page without events: how far the log reaches, and what it shares with `known` incarnations."""

    async def wait_for_capacity(self) -> None:
        """Wait while too many bytes await commit or, in a bridge, await sending."""

    def covered(self, origin: int, branch: Branch, offset: int) -> None:
        """Note that nothing of this log up to `offset` is missing, as the log has confirmed."""

    def look_up(self, publisher_id: int, sequence: int) -> Arrival:
        """Return what is known of an identity."""

    def proven(self, peer: Peer, shared: int) -> None:
        """Note that the log of a peer has replied, so that this incarnation exists."""

    def report_late(self, envelope: Envelope, link: str) -> None:
        """Report an event that is dropped, because later events of its publisher were delivered."""

    def report_rewound(self, origin: int, branch: Branch, known: int, shared: int) -> None:
        """Report that a log, known up to `known`, has the same events only up to `shared`."""

    def report_unconfirmed(self, origin: int, claimed: int, head: int, link: str) -> None:
        """Report that a position was claimed which the log, which ends at `head`, has not reached."""

    def past_fetched(self, origin: int, expression: str, reached: int | None) -> None:
        """Note how far the past events of an expression were fetched; None: all of them."""


class Peer:
    """Another node. Lives on the loop. `id` is its origin, which is odd if the node has a log."""

    def __init__(
        self,
        id: int,  # noqa: A002
        context: PeerContext,
        covered: int | None,
        runtime: Runtime,
        branch: Branch = NO_BRANCH,
        known: Mapping[int, int] = NOTHING_KNOWN,
        owed: Mapping[str, int] = NOTHING_OWED,
    ) -> None:
        """Start at `covered`; None if that is not known.

        `known` has other incarnations of its log with the offsets that were reached in them, which its log compares
        with its own. `owed` has expressions whose past events are still to be requested, each after an offset.
        """
        self.id, self.branch, self._context, self._runtime = id, branch, context, runtime
        self._monotonic, self._time_ns = runtime.monotonic, runtime.steady_ns
        self._confirmed = covered  # its log has confirmed that it reaches this offset
        self._claimed = 0  # how far its log reaches, as beacons say
        self._believed: deque[int] = deque(maxlen=BELIEVED_MAX)  # the heads of the last beacons
        self._confirming: asyncio.Task[None] | None = None
        self._known = known
        self._is_proven = False  # the log has replied
        self._has_history = covered is not None  # this incarnation or an earlier one is known
        self._skew_ns: int | None = None  # how far its clock is ahead of ours, at least
        self._doubted_at = -math.inf
        self.has_log = bool(id & 1)
        self._link = ""  # the link over which it was last seen
        self._covered = covered  # nothing up to this offset is missing; None for a new peer
        self._covered_at = self._time_ns()
        self._clock_ns = NEVER  # when the first received event was published, by the clock of the peer
        self._taken_events = 0
        self._last: dict[str, int] = {}
        self._buffered: deque[tuple[Envelope, str]] = deque()
        self._buffered_bytes = 0
        self._evicted_up_to = 0
        self._pending: Beacon | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._repairing: asyncio.Task[None] | None = None
        self._seen_again = asyncio.Event()
        self._complete = False
        self._rewind_to: int | None = None
        self._owed = dict(owed)
        self._settling_beacons = 0  # until this many beacons arrived, the first event of a key reveals no gap
        self._gap_ledger = GapLedger(id, context, runtime)
        # The heads of the beacons during a repair, and when they came.
        self._heads: deque[tuple[float, int]] = deque(maxlen=HEADS_KEPT)
        self._gave_up = False  # since the last beacon: some events up to `_covered` did not arrive
        self._has_open_gaps = False  # keys without a gap are delivered, and stored keys with a gap wait
        self._trimmed: TrimmedRanges | None = None
        self._deadline = 0.0  # of the repair, unless events arrive
        self._repaired_after: int | None = None  # what the repair began with; None for a new peer

    @property
    def covered(self) -> int:
        """The offset up to which nothing is missing; 0 for a new peer."""
        return self._covered or 0

    @property
    def confirmed(self) -> int | None:
        """The offset up to which nothing is missing, as its log has confirmed; None for a new peer."""
        return self._confirmed

    @property
    def reach(self) -> int:
        """The highest offset that was received or confirmed."""
        return max(self.covered, self._confirmed or 0, *self._last.values(), 0)

    def ask(self) -> None:
        """Ask the log, because only its reply shows that this incarnation exists."""
        if self.has_log:
            self._repair()

    def succeed(self, other: Peer) -> None:
        """Take over what is known from an earlier incarnation of the same log, which has ended."""
        if other.branch.id != self.branch.parent:
            return
        first = self.branch.first
        self._last = {key: offset for key, offset in other._last.items() if offset < first} | self._last
        self._clock_ns = min(self._clock_ns, other._clock_ns)
        self._has_history = True
        self._gap_ledger.succeed(other._gap_ledger)
        if other._pending is not None:
            self._gap_ledger.note_newest(other._pending.newest)
        if buffered := [item for item in other._buffered if item[0].offset < first]:
            for envelope, link in buffered:
                self._buffer([envelope], link)
            self._evicted_up_to = max(self._evicted_up_to, other._evicted_up_to)
            self._repair()

    def take(self, envelopes: Sequence[Envelope], link: str) -> Sequence[Envelope]:
        """Return the events that are new and follow their predecessors. Events after a gap are buffered."""
        self._link = link
        if self._repairing is not None:
            self._seen_again.set()
            if self._has_open_gaps:
                envelopes = self._take_unbroken(envelopes, link)
                self._bound_keys()
                self._taken_events += len(envelopes)
                return envelopes
            self._buffer(envelopes, link)
            return ()
        if self._covered is None and not self.has_log:
            self._covered, self._settling_beacons = 0, 2  # the events before the first one of each key are not missed
        last, covered = self._last, self._covered or 0
        new: list[Envelope] = []
        key, seen, contradicted = "", 0, False
        for at, envelope in enumerate(envelopes):
            if envelope.key != key:
                key = envelope.key
                seen = max(last.get(key, covered), covered)
            if envelope.offset <= seen:
                if new and new[-1].offset == envelope.offset and _identity(new[-1]) == _identity(envelope):
                    self._context.count("duplicates_received", 1)  # it was buffered twice
                elif self._is_missed(envelope):
                    new.append(envelope)
                    contradicted = True
                continue
            if envelope.previous > seen and not (self._settling_beacons and not self.has_log and key not in last):
                self._buffer(envelopes[at:], link)
                self._repair()
                break
            if self._gave_up and envelope.previous > last.get(key, covered):  # lost when the repair was given up
                self._context.report_gap(self.id, key, envelope.publisher_id, envelope.sequence)
            last[key] = seen = envelope.offset
            new.append(envelope)
        self._taken_events += len(new)
        self._bound_keys()
        if new and self._clock_ns == NEVER:
            self._clock_ns = new[0].published_at
        if self._trimmed is not None:
            self._trimmed.report(new)
        if contradicted:
            self._doubt()
        elif self._owed and self._repairing is None:
            self._repair()
        return new

    def beacon(self, beacon: Beacon, link: str) -> None:
        """Compare the events that arrived with those that were sent."""
        self._link = link
        self._settling_beacons = max(0, self._settling_beacons - 1)
        if self._covered is None and not self.has_log:
            # Its events may still be in flight on another thread, or were sent before this node subscribed.
            self._covered, self._settling_beacons = beacon.since, 1
        self._seen_again.set()
        if self._owed:
            self._repair()
        if self._covered is not None and beacon.head <= self._covered:
            return
        if self._repairing is not None:
            self._note_newest(beacon)
            self._heads.append((self._monotonic(), beacon.head))
            return
        pending = self._pending
        if pending is not None and beacon.since <= pending.head:
            beacon = Beacon(self.id, pending.since, max(pending.head, beacon.head), pending.newest | beacon.newest)
        follows = self._covered is not None and (beacon.since <= self._covered or beacon.since in self._believed)
        if self._covered is None or (self.has_log and not follows):
            self._note_newest(beacon)
            self._repair()  # the peer is new, or a beacon is missing
            self._heads.append((self._monotonic(), beacon.head))
        elif self._missing(beacon):
            self._pending = beacon
            if self._timer is None:
                self._await_tail(TAIL_TURNS_MAX)
        else:
            self._believe(beacon)

    def interest_changed(self) -> None:
        """Note that the key expressions have changed: the first event of a key may have unknown predecessors."""
        self._settling_beacons = 2

    def rewind(self, offset: int) -> None:
        """Request the events after `offset`, an earlier `covered`, again, because some could not be stored."""
        if self.has_log:
            self._rewind_to = offset if self._rewind_to is None else min(self._rewind_to, offset)
            self._repair()

    def fetch_past(self, expressions: Sequence[str]) -> bool:
        """Request the past events of expressions as well. Return False for a new peer: it is asked for them anyway."""
        if not self.has_log or (self._covered is None and not self._last and self._repairing is None):
            return False
        self._owed.update(dict.fromkeys(expressions, 0))
        self._repair()
        return True

    def close(self) -> list[asyncio.Task[None]]:
        """Stop. Return the tasks to wait for."""
        if self._timer is not None:
            self._timer.cancel()
        ending = [task for task in (self._repairing, self._confirming) if task is not None]
        for task in ending:
            task.cancel()
        self._gap_ledger.close()
        return ending

    # Claims and what the log confirms.

    def _is_missed(self, envelope: Envelope) -> bool:
        """Return whether an event must be delivered, although its offset was passed already.

        Only its identity shows that it is a duplicate. If later events of its publisher were delivered, it was given
        up as lost, and to deliver it now would break their order; but an event that this node stores is never dropped.
        """
        arrival = self._context.look_up(envelope.publisher_id, envelope.sequence)
        if arrival is Arrival.DUPLICATE:
            self._context.count("duplicates_received", 1)
            return False
        if arrival is Arrival.SKIPPED and not self._context.interest.of(envelope.key).stored:
            self._context.report_late(envelope, self._link)
            return False
        return True

    def _doubt(self) -> None:
        """Forget everything that its log has not confirmed, and request it again: a claim contradicts an event."""
        now = self._monotonic()
        if now - self._doubted_at < DOUBT_S:
            return
        self._doubted_at, self._claimed = now, 0
        self._last.clear()
        self._pending = None
        if self.has_log:
            self._covered = self._confirmed
            self._repair()
        else:
            self._covered, self._settling_beacons = 0, 2

    def _confirm_soon(self) -> None:
        if self._confirming is None:
            self._confirming = asyncio.get_running_loop().create_task(self._confirm())

    async def _confirm(self) -> None:
        """Ask the log whether it reaches the position that was claimed, until it has said so.

        It is also asked for the events after the last one that a beacon named. If there are any, they are missing.
        """
        pauses, refused = Backoff(*CONFIRM_S, jitter=0, uniform=self._runtime.uniform), 0
        try:
            while self._unconfirmed():
                await asyncio.sleep(pauses.next())
                if not self._unconfirmed():
                    continue  # a repair has, or will
                covered, claimed = self._covered or 0, max(self._covered or 0, self._claimed)
                try:
                    if claimed > covered:
                        page = await self._context.page(self.id, covered, 0, self._link, incarnation=self.branch.id)
                    else:
                        page = await self._context.describe(self.id, self.branch.id, self._link, NOTHING_KNOWN)
                    self._proven(page)
                except Exception as error:  # it is asked again; until then the position is not stored
                    record_reason(EVENT_RETRY, logging.DEBUG, code="confirm_failed", reason=str(error), origin=self.id)
                    continue
                pauses.reset()
                if not self._unconfirmed():
                    continue
                if any(self._is_missing(each) for each in page.envelopes if each.offset <= claimed):
                    self._repair()
                elif page.head >= claimed:
                    refused = 0
                    self._confirmed = min(claimed, page.covered)
                    self._covered = max(self._confirmed, self._covered or 0)
                    self._context.covered(self.id, self.branch, self._confirmed)
                elif (refused := refused + 1) >= UNCONFIRMED_MAX:
                    self._refuse(claimed, page.head)
        finally:
            self._confirming = None

    def _is_missing(self, envelope: Envelope) -> bool:
        """Return whether an event of a page did not arrive, although this node wants it."""
        since = self._context.interest.of(envelope.key).since
        return not self._predates_interest(envelope, since) and not self._is_known(envelope)

    def _unconfirmed(self) -> bool:
        claimed = max(self._covered or 0, self._claimed)
        return self._repairing is None and claimed > (-1 if self._confirmed is None else self._confirmed)

    def _refuse(self, claimed: int, head: int) -> None:
        """Forget a position that the log has not reached."""
        if self._confirmed is not None and head < self._confirmed:  # only version 0.1 does not name its incarnation
            self._context.report_rewound(self.id, self.branch, self._confirmed, head)
            self._confirmed = head
        else:
            self._context.report_unconfirmed(self.id, claimed, head, self._link)
        self._doubted_at = -math.inf
        self._doubt()

    def _missing(self, beacon: Beacon) -> list[str]:
        covered, interest = self._covered or 0, self._context.interest
        return [
            key
            for key, (offset, _, _) in beacon.newest.items()
            if offset > self._expected_after(key, covered) and interest.of(key).since != NEVER
        ]

    def _expected_after(self, key: str, covered: int) -> int:
        """Return the offset after which the events of a key are expected."""
        last = self._last.get(key, 0)
        return last if self._gave_up and last else max(covered, last)

    def _note_newest(self, beacon: Beacon) -> None:
        """Keep what a beacon names in case the log cannot be reached, unless it may predate the subscription."""
        if not self._settling_beacons and (self._covered is not None or self._last):
            self._gap_ledger.note_newest(beacon.newest)

    def _await_tail(self, turns: int) -> None:
        check = partial(self._check_tail, self._taken_events, turns)
        self._timer = asyncio.get_running_loop().call_later(TAIL_S, check)

    def _check_tail(self, taken: int, turns: int) -> None:
        self._timer = None
        beacon, self._pending = self._pending, None
        if beacon is None or self._repairing is not None:
            return
        missing = self._missing(beacon)
        if missing and taken != self._taken_events and turns:  # much is in flight: a request would add to it
            self._pending = beacon
            self._await_tail(turns - 1)
            return
        for key in [each for each in missing if self.has_log and beacon.newest[each][0] <= (self._covered or 0)]:
            _, publisher_id, sequence = beacon.newest[key]  # lost when the repair was given up
            self._context.report_gap(self.id, key, publisher_id, sequence + 1)
            missing.remove(key)
        if not missing or (self._settling_beacons and not self.has_log):
            self._believe(beacon)
        elif self.has_log:
            self._note_newest(beacon)
            self._repair()
        else:
            for key in missing:
                _, publisher_id, sequence = beacon.newest[key]
                self._context.report_gap(self.id, key, publisher_id, sequence + 1)
            self._believe(beacon)

    def _believe(self, beacon: Beacon) -> None:
        """Advance as far as the events that a beacon names show. That its log reaches further, the log must confirm."""
        self._claimed = max(beacon.head, self._claimed)
        self._believed.append(beacon.head)
        named = max([offset for offset, _, _ in beacon.newest.values()], default=0)
        self._advance(min(beacon.head, named) if self.has_log else beacon.head)

    def _advance(self, head: int) -> None:
        self._covered, self._pending = max(head, self._covered or 0), None
        self._covered_at = self._time_ns()
        self._gave_up = False
        self._last = {key: offset for key, offset in self._last.items() if offset > head}
        if self._confirmed is not None and max(self._covered, self._claimed) <= self._confirmed:
            self._context.covered(self.id, self.branch, self._covered)
        elif self.has_log:
            self._confirm_soon()

    def _bound_keys(self) -> None:
        """Forget the older half of the keys if there are too many, as of a peer that sends no beacons.

        The next event of such a key looks like one after a gap, and is compared with the peer's log.
        """
        if len(self._last) > KEYS_MAX:
            evicted = len(self._last) // 2
            self._last = dict(islice(self._last.items(), evicted, None))
            self._context.count("peer_keys_evicted", evicted)

    # Repair.

    def _buffer(self, envelopes: Sequence[Envelope], link: str) -> None:
        for envelope in envelopes:
            self._buffered.append((envelope, link))
            self._buffered_bytes += len(envelope.payload)
            while len(self._buffered) > BUFFERED_EVENTS_MAX or self._buffered_bytes > BUFFERED_BYTES_MAX:
                self._evicted_up_to = max(self._evicted_up_to, self._unbuffer().offset)

    def _unbuffer(self) -> Envelope:
        envelope, _ = self._buffered.popleft()
        self._buffered_bytes -= len(envelope.payload)
        return envelope

    def _take_buffered(self) -> list[tuple[Envelope, str]]:
        """Return the buffered events in order, and forget them."""
        taken, self._buffered, self._buffered_bytes = sorted(self._buffered, key=_by_offset), deque(), 0
        return taken

    def _repair(self) -> None:
        if self._repairing is None:
            self._pending = None
            self._claimed = 0  # the pages will show it
            self._heads.clear()
            self._repaired_after = (self._covered or 0) if self._covered is not None or self._last else None
            run = self._run_repair if self.has_log else self._await_and_give_up
            self._repairing = asyncio.get_running_loop().create_task(run())

    async def _run_repair(self) -> None:
        """Request pages until nothing is missing. If this node stores no events of others, stop after `GIVE_UP_S`."""
        found = 0
        self._has_history = self._has_history or self._covered is not None or bool(self._last)
        pauses = Backoff(*RETRY_S, uniform=self._runtime.uniform)
        failed = False
        self._deadline = self._monotonic() + GIVE_UP_S
        fields: dict[str, Any] = {"origin": f"{self.id:x}", "correlation_id": self._runtime.token_hex(8)}
        record(EVENT_REPLAY_REQUESTED, logging.DEBUG, after=self._covered or 0, **fields)
        while True:
            try:
                if self._covered is None and (self._known or self._skew_ns is None):
                    await self._compare()
                if self._owed:
                    await self._fetch(*next(iter(self._owed.items())))
                if self._rewind_to is not None:
                    self._covered, self._rewind_to = min(self._covered or 0, self._rewind_to), None
                    self._repaired_after = min(self._covered, self._repaired_after or 0)
                    self._last.clear()
                page = await self._page()
                found += len(page)
                if page or self._complete:
                    self._has_open_gaps = False
                if self._is_done():
                    break
                await self._progress(len(page))
                pauses.reset()
            except Exception as error:
                pause = pauses.next()
                if not isinstance(error, RequestError):  # no responders, or a timeout: expected, so only retry
                    unexpected = None if isinstance(error, ZbusError) else error
                    record_reason(
                        EVENT_RETRY,
                        logging.WARNING,
                        unexpected,
                        code="repair_failed",
                        reason=str(error),
                        origin=self.id,
                        again_in_s=round(pause, 3),
                    )
                if self._monotonic() > self._deadline:
                    if not failed:
                        record_reason(
                            EVENT_REPLAY_FAILED,
                            logging.WARNING,
                            code="repair_timeout",
                            reason=str(error),
                            events=found,
                            **fields,
                        )
                    failed = True
                    self._give_up()
                    if self._repairing is None:
                        return
                    self._deadline = self._monotonic() + GIVE_UP_S
                self._seen_again.clear()
                if not isinstance(error, RequestError):  # the peer replied: its events do not mean that it is back
                    await asyncio.sleep(pause)
                    continue
                with suppress(TimeoutError):  # retry early if the peer is seen again
                    async with asyncio.timeout(pause):  # `wait_for` may lose a cancellation before Python 3.12
                        await self._seen_again.wait()
        if found and self._has_history:
            self._context.count("gaps", 1)
            self._context.count("gaps_repaired", 1)
        self._context.count("events_repaired", found)
        record(EVENT_REPLAY_DELIVERED, logging.DEBUG, events=found, **fields)
        self._resume()

    async def _progress(self, events: int) -> None:
        """Note that a page had new events. Raises `TransportError` after `GIVE_UP_S` without new events.

        A log that claims to reach ever further without sending an event would otherwise delay the buffered ones.
        """
        if events or not self._buffered:
            self._deadline = self._monotonic() + GIVE_UP_S
        elif self._monotonic() > self._deadline:
            raise TransportError(f"the pages of log {self.id:x} had no new events for {GIVE_UP_S:g} s")
        if not events:
            await asyncio.sleep(EMPTY_PAGE_S)

    def _is_done(self) -> bool:
        nothing_else = not self._owed and self._rewind_to is None
        return self._complete and nothing_else and self._evicted_up_to <= (self._covered or 0)

    async def _compare(self) -> None:
        """Ask the log for the offset that it shares with the known incarnations, and for the time of its clock."""
        known, asked_at = self._known, self._time_ns()
        page = await self._context.describe(self.id, self.branch.id, self._link, known)
        self._proven(page, (page.shared or 0) if known else NUMBER_MAX)
        self._measure_skew(page.now_ns, asked_at)
        if known:
            self._known, most = NOTHING_KNOWN, max(known.values())
            shared = None if page.shared is None else min(page.shared, most)
            self._covered = self._confirmed = shared
            if (shared is None or shared < most) and most <= self.branch.before:  # otherwise it is reported already
                self._context.report_rewound(self.id, self.branch, most, shared or 0)

    def _proven(self, page: LogPage, shared: int = NUMBER_MAX) -> LogPage:
        """Note that the log has replied, and shares at most this offset with what is known.

        Raises `TransportError` if it is in another incarnation.
        """
        if page.branch.id not in (0, self.branch.id):
            raise TransportError(f"log {self.id:x} is in incarnation {page.branch.id:x}, not {self.branch.id:x}")
        if not self._is_proven:
            self._is_proven = True
            self._context.proven(self, shared)
        return page

    def _measure_skew(self, now_ns: int, asked_at: int) -> None:
        """Note how far the clock of the peer is ahead at least. Less than the time of a round trip is not a skew."""
        if not now_ns:  # version 0.1 does not say
            self._skew_ns = self._skew_ns or 0
            return
        least, most = now_ns - self._time_ns(), now_ns - asked_at
        self._skew_ns = 0 if least <= 0 <= most else least

    async def _page(self) -> Sequence[Envelope]:
        """Request the next page, deliver its new events in order, and wait until they are stored. Return them."""
        after, interest = self._covered or 0, self._context.interest
        # A new peer is asked by time instead of offset: by its own clock.
        from_ns = 0
        if self._covered is None and interest.earliest:
            from_ns = max(0, min(interest.earliest + (self._skew_ns or 0), self._clock_ns))
        link, asked_at, claims = self._link, self._time_ns(), list(self._heads)
        page = self._proven(await self._context.page(self.id, after, from_ns, link, incarnation=self.branch.id))
        self._measure_skew(page.now_ns, asked_at)
        if false := [claim for claim in claims if claim[1] > page.head and claim in self._heads]:
            self._context.report_unconfirmed(self.id, max(head for _, head in false), page.head, link)
            self._heads = deque((each for each in self._heads if each not in false), HEADS_KEPT)
        self._check_page(page, after)
        trimmed = (self._covered is not None or bool(self._last)) and page.low_water > after
        new: list[Envelope] = []
        for envelope in page.envelopes:
            if self._predates_interest(envelope, interest.of(envelope.key).since):
                continue
            if envelope.offset > max(after, self._last.get(envelope.key, 0)):
                new.append(envelope)
        reported = trimmed and await self._accept_buffered(page.low_water)
        if page.skipped:
            new = self._with_buffered(new, page.covered)
        if trimmed:
            self._trimmed = TrimmedRanges(self.id, page.low_water, self._context, self._runtime)
        reported = (self._trimmed is not None and self._trimmed.report(new)) or reported
        if trimmed and not reported and self._trimmed is not None:
            self._trimmed.count()
            reason = "retention removed it at the publisher"
            span: dict[str, Any] = {"after": after, "until": page.low_water}
            record_reason(EVENT_GAP, logging.WARNING, code="gap_trimmed", reason=reason, origin=self.id, **span)
        await self._context.wait_for_capacity()
        stored = self._context.accept(new, link, repaired=True)
        if stored is not None:
            await stored
        for envelope in new:
            self._last[envelope.key] = max(envelope.offset, self._last.get(envelope.key, 0))
        self._covered = self._confirmed = max(after, page.covered)
        self._complete = page.covered >= page.head
        while self._buffered and self._buffered[0][0].offset <= self._covered and self._is_known(self._buffered[0][0]):
            self._unbuffer()  # the log supplied it
        return new

    async def _accept_buffered(self, until: int) -> bool:
        """Deliver the buffered events up to an offset, which the log no longer has. Report what is missing before them.

        Return whether anything is.
        """
        stored: Awaitable[object] | None = None
        reported = False
        for envelope, link in sorted(self._buffered, key=_by_offset):
            if envelope.offset <= until and not self._is_known(envelope):
                identity = (envelope.publisher_id, envelope.sequence)
                reported = self._context.report_gap(self.id, envelope.key, *identity) or reported
                stored = self._context.accept([envelope], link, repaired=True) or stored
        if stored is not None:
            await stored
        return reported

    def _with_buffered(self, found: list[Envelope], until: int) -> list[Envelope]:
        """Return the events of a page together with the buffered ones that the log no longer has, in order."""
        offsets = {envelope.offset for envelope in found}
        kept = {each.offset: each for each, _ in self._buffered if each.offset <= until and each.offset not in offsets}
        return sorted([*found, *kept.values()], key=lambda envelope: envelope.offset)

    def _is_known(self, envelope: Envelope) -> bool:
        return self._context.look_up(envelope.publisher_id, envelope.sequence) is Arrival.DUPLICATE

    def _check_page(self, page: LogPage, after: int) -> None:
        """Report corrupt events that the peer left out. Raises `TransportError` if the page does not advance."""
        if page.covered <= after and page.covered < page.head:
            reason = f"the page after offset {after} covers nothing, although the log reaches {page.head}"
            raise TransportError(reason)
        if page.skipped:
            self._context.count("gaps", 1)
            self._context.count("gaps_unrepaired", 1)
            reason = "events are corrupt in the log of the publisher"
            span: dict[str, Any] = {"after": after, "until": page.covered, "events": page.skipped}
            record_reason(EVENT_GAP, logging.WARNING, code="gap_corrupt", reason=reason, origin=self.id, **span)

    def _predates_interest(self, envelope: Envelope, since: int) -> bool:
        """Return whether an event was published before this node wanted its key.

        The peer's clock decides only if nothing else can: for a new peer or a new expression.
        """
        if envelope.key in self._last or (self._covered is not None and since <= self._covered_at):
            return False
        return envelope.published_at < since + (self._skew_ns or 0)

    async def _fetch(self, expression: str, after: int) -> None:
        """Deliver everything that the log has for an expression. Events that are known already are duplicates."""
        link, interest = self._link, self._context.interest
        while True:
            page = await self._context.page(self.id, after, 0, link, (expression,), incarnation=self.branch.id)
            self._check_page(page, after)
            wanted = [
                each
                for each in page.envelopes
                if each.published_at >= interest.of(each.key).since + min(0, self._skew_ns or 0)
            ]
            await self._context.wait_for_capacity()
            stored = self._context.accept(wanted, link, repaired=True)
            if stored is not None:
                await stored
            if page.covered >= page.head:
                del self._owed[expression]
                self._context.past_fetched(self.id, expression, None)
                return
            after = self._owed[expression] = page.covered
            self._context.past_fetched(self.id, expression, after)
            await self._progress(len(wanted))

    async def _await_and_give_up(self) -> None:
        await asyncio.sleep(TAIL_S)  # the events may still be in flight over another link
        self._give_up()

    def _give_up(self) -> None:
        """Report the missing events as gaps, and deliver the buffered ones.

        If the peer has a log, the stored keys with a gap keep waiting for it; the others do not.
        """
        buffered = self._take_buffered()
        interest, waits = self._context.interest, self.has_log and self._context.interest.stores_any
        given_up = self._covered or 0  # up to here, what did not arrive is reported
        run: list[Envelope] = []
        run_link = ""
        for envelope, link in buffered:
            seen = self._reached(envelope.key)
            if envelope.offset <= seen:
                self._context.accept(run, run_link)  # first: they may be what shows that it is a duplicate
                run, run_link = [], link
                if self._is_missed(envelope):
                    run.append(envelope)
                continue
            if waits and envelope.previous > seen and interest.of(envelope.key).stored:
                self._buffer([envelope], link)
                continue
            if envelope.previous > seen or link != run_link:
                self._context.accept(run, run_link)
                run, run_link = [], link
            if envelope.previous > seen:
                self._context.report_gap(self.id, envelope.key, envelope.publisher_id, envelope.sequence)
                given_up = max(given_up, envelope.previous)
            self._last[envelope.key] = envelope.offset
            run.append(envelope)
        self._context.accept(run, run_link)
        fresh, tails = self._gap_ledger.missing_tails(self._reached, TAIL_S)
        for key in [each for each in tails if not (waits and interest.of(each).stored)]:
            self._last[key], publisher_id, sequence = tails.pop(key)
            given_up = max(given_up, self._last[key])
            self._context.report_gap(self.id, key, publisher_id, sequence + 1)
        if waits:
            self._gap_ledger.report([envelope for envelope, _ in self._buffered], tails, self._reached)
            self._has_open_gaps = True
            return
        self._gap_ledger.close()
        self._evicted_up_to, self._repairing = 0, None
        if self.has_log:  # otherwise every beacon would request the lost events again
            self._covered = self._settled_up_to(given_up, fresh)
            self._gave_up = True
            if fresh:  # its last beacon is recent: the events that it names may still be in flight
                head = max(offset for offset, _, _ in fresh.values())
                self.beacon(Beacon(self.id, self._covered, head, fresh), self._link)

    def _settled_up_to(self, given_up: int, fresh: Mapping[str, Newest]) -> int:
        """Return the offset up to which every event arrived or was reported, after a repair was given up.

        Beacons named the events up to it. Later ones may still be in flight, whatever has overtaken them, and so may
        those in `fresh`.
        """
        before = self._monotonic() - TAIL_S
        first = min([offset for offset, _, _ in fresh.values()], default=NUMBER_MAX)
        heads = [head for at, head in self._heads if at <= before and head < first]
        settled: list[int] = heads or list(self._last.values())
        return max([given_up, *settled])

    def _take_unbroken(self, envelopes: Sequence[Envelope], link: str) -> list[Envelope]:
        """Return the events whose predecessors arrived, and buffer the others, while the peer has open gaps."""
        new: list[Envelope] = []
        for envelope in envelopes:
            seen = self._reached(envelope.key)
            if envelope.offset <= seen:
                if self._is_missed(envelope):
                    new.append(envelope)
            elif envelope.previous > seen:
                self._buffer([envelope], link)
            else:
                self._last[envelope.key] = envelope.offset
                new.append(envelope)
        return new

    def _reached(self, key: str) -> int:
        """Return the offset up to which all events of a key arrived or were given up, during a repair.

        Pages that cover a range without the events of it that are buffered here prove nothing.
        """
        covered = self._covered if self._repaired_after is None else self._repaired_after
        return max(covered or 0, self._last.get(key, 0))

    def _resume(self) -> None:
        """Deliver the events that were buffered during the repair."""
        self._gap_ledger.close()
        buffered = self._take_buffered()
        self._evicted_up_to, self._repairing = 0, None
        for link, items in groupby(buffered, key=lambda item: item[1]):
            envelopes = [envelope for envelope, _ in items]
            self._context.accept(self.take(envelopes, link), link)
        if self._repairing is None:
            self._advance(self._covered or 0)


def _identity(envelope: Envelope) -> tuple[int, int]:
    return envelope.publisher_id, envelope.sequence


def _by_offset(item: tuple[Envelope, str]) -> int:
    return item[0].offset
