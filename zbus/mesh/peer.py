"""A peer: another node as this one sees it, with what it sent, what is missing, and the repair of gaps.

Each event names the event before it on its key, and beacons name the position that the peer has reached, so a gap is
detected with the next beacon at the latest. The peer's later events are then buffered, and the events after the last
offset up to which nothing is missing are requested from its log, page by page. After that, the buffered events are
delivered: nothing is out of order, and nothing is delivered twice. Events that cannot be requested are reported as a
gap. The gap is permanent and delivery resumes; or, for keys that this node stores, the gap stays open until the peer
is back.

Events are delivered as they arrive, and only those that are known by identity are duplicates; but the position of the
peer is stored only once its log has confirmed what its beacons claim.

Each incarnation of a log is a peer of its own, so two copies of one log are never mixed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from typing import Any

from zbus.errors import RequestError, TransportError, ZbusError
from zbus.event import NUMBER_MAX
from zbus.observe.records import (
    EVENT_REPLAY_DELIVERED,
    EVENT_REPLAY_FAILED,
    EVENT_REPLAY_REQUESTED,
    EVENT_RETRY,
    record,
    record_reason,
)
from zbus.ports.lineage import NO_BRANCH, Branch, Mark
from zbus.util.backoff import Backoff
from zbus.util.runtime import Runtime
from zbus.wire.beacon import Beacon
from zbus.wire.envelope import Envelope

from .buffered_events import BufferedEvents
from .dedup import Arrival
from .gap_ledger import GapLedger, TrimmedRanges
from .host import PeerContext
from .interest import NEVER
from .log_service import NOTHING_KNOWN, LogPage
from .origins.claims import Claims
from .origins.clock_skew import ClockSkew
from .origins.known_logs import NOTHING_OWED

TAIL_S = 0.25  # how long the last events that a beacon names may still be in flight
TAIL_TURNS_MAX = 20  # how often that time is extended while other events keep arriving
GIVE_UP_S = 10.0
RETRY_S = (0.05, 2.0)
RETRY_AWAY_S = (2.0, 60.0)  # after it was given up, unless the peer is seen again
KEYS_MAX = 100_000  # whose last offsets are kept between two beacons
EMPTY_PAGE_S = 0.01  # the pause after a page without events, if more follow


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
        mark: Mark | None = None,
    ) -> None:
        """Start at `covered`; None if that is not known.

        `known` has other incarnations of its log with the offsets that were reached in them, which its log compares
        with its own. `owed` has expressions whose past events are still to be requested, each after an offset. `mark`
        is what its log had before, which is compared with what it has now.
        """
        self.id, self.branch, self._context, self._runtime = id, branch, context, runtime
        self._monotonic, self._time_ns = runtime.monotonic, runtime.steady_ns
        self._has_history = covered is not None  # this incarnation or an earlier one is known
        self._skew = ClockSkew(self._time_ns)
        self.has_log = bool(id & 1)
        self.link = ""  # the link over which it was last seen
        self._covered = covered  # nothing up to this offset is missing; None for a new peer
        self._covered_at = self._time_ns()
        self._clock_ns = NEVER  # when the first received event was published, by the clock of the peer
        self._taken_events = 0
        self._last: dict[str, int] = {}
        self._passed: dict[str, int] = {}  # the last offset of keys that beacons have passed since the last repair
        self._buffered = BufferedEvents(context.buffer_budget)
        self._pending: Beacon | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._repairing: asyncio.Task[None] | None = None
        self._seen_again = asyncio.Event()
        self._complete = False
        self._rewind_to: int | None = None
        self._owed = dict(owed)
        self._settling_beacons = 0  # until this many beacons arrived, the first event of a key reveals no gap
        self._gap_ledger = GapLedger(id, context, runtime)
        self._claims = Claims(self, context, runtime, covered, known, mark)
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
        return self._claims.confirmed

    @property
    def reach(self) -> int:
        """The highest offset that was received or confirmed."""
        return max(self.covered, self.confirmed or 0, *self._last.values(), 0)

    @property
    def is_proven(self) -> bool:
        """Whether its log has replied."""
        return self._claims.is_proven

    @property
    def is_repairing(self) -> bool:
        """Whether its log is being asked for missing events."""
        return self._repairing is not None

    def ask(self) -> None:
        """Request the missing events from its log. Only its reply shows that this incarnation exists."""
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
                self._buffered.add([envelope], link)
            self._buffered.evicted_up_to = max(self._buffered.evicted_up_to, other._buffered.evicted_up_to)
            self._repair()

    def take(self, envelopes: Sequence[Envelope], link: str) -> Sequence[Envelope]:
        """Return the events that are new and follow their predecessors. Events after a gap are buffered."""
        self.link = link
        if self._repairing is not None:
            self._seen_again.set()
            if self._has_open_gaps:
                envelopes = self._take_unbroken(envelopes, link)
                self._bound_keys()
                self._taken_events += len(envelopes)
                return envelopes
            self._buffered.add(envelopes, link)
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
                if (
                    self.has_log
                    and key not in last
                    and self._passed.get(key, NUMBER_MAX) < envelope.previous <= covered
                ):
                    self._buffered.add(envelopes[at:], link)
                    self.distrust(self._passed[key])  # a false beacon passed events that did not arrive
                    break
            if envelope.offset <= seen:
                if new and new[-1].offset == envelope.offset and _identity(new[-1]) == _identity(envelope):
                    self._context.count("duplicates_received", 1)  # it was buffered twice
                elif self._is_missed(envelope):
                    if self._claims.may_be_reverted(envelope.offset):
                        self._buffered.add(envelopes[at:], link)  # events before it may be missing as well
                        self._repair()
                        break
                    new.append(envelope)
                    contradicted = True
                continue
            if envelope.previous > seen and not (self._settling_beacons and not self.has_log and key not in last):
                self._buffered.add(envelopes[at:], link)
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
            self._claims.doubt()
        elif self._owed and self._repairing is None:
            self._repair()
        return new

    def beacon(self, beacon: Beacon, link: str) -> None:
        """Compare the events that arrived with those that were sent."""
        self.link = link
        self._settling_beacons = max(0, self._settling_beacons - 1)
        self.seen()
        if self._covered is None and not self.has_log:
            # Its events may still be in flight on another thread, or were sent before this node subscribed.
            self._covered, self._settling_beacons = beacon.since, 1
        if self._owed:
            self._repair()
        if self._covered is not None and beacon.head <= self._covered:
            self._claims.not_advanced(beacon.head)
            return
        if self._repairing is not None:
            self._note_newest(beacon)
            self._claims.note_head(beacon.head)
            return
        pending = self._pending
        if pending is not None and beacon.since <= pending.head:
            beacon = Beacon(self.id, pending.since, max(pending.head, beacon.head), pending.newest | beacon.newest)
        since = beacon.since
        follows = self._covered is not None and (since <= self._covered or self._claims.is_believed(since))
        if self._covered is None or (self.has_log and not follows):
            self._note_newest(beacon)
            self._repair()  # the peer is new, or a beacon is missing
            self._claims.note_head(beacon.head)
        elif self._missing(beacon):
            self._pending = beacon
            if self._timer is None:
                self._await_tail(TAIL_TURNS_MAX)
        else:
            self._believe(beacon)

    def seen(self) -> None:
        """Note that its node is connected: what was not answered is requested again at once."""
        self._seen_again.set()
        self._claims.seen_again.set()

    def interest_changed(self) -> None:
        """Note that the key expressions have changed: the first event of a key may have unknown predecessors."""
        self._settling_beacons = 2
        self._passed.clear()

    def rewind(self, offset: int) -> None:
        """Request the events after `offset`, an earlier `covered`, again, because some could not be stored."""
        if self.has_log:
            self._rewind_to = offset if self._rewind_to is None else min(self._rewind_to, offset)
            self._repair()

    def distrust(self, offset: int) -> None:
        """Request the events after `offset` again, because the position may be one in another copy of the log."""
        if self._claims.confirmed is not None:
            self._claims.confirmed = min(offset, self._claims.confirmed)
        self.rewind(offset)

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
        ending = self._claims.close()
        if self._repairing is not None:
            self._repairing.cancel()
            ending.append(self._repairing)
        self._buffered.take()
        self._gap_ledger.close()
        return ending

    def _passed_too_far(self, envelope: Envelope) -> int | None:
        """Return the last offset of a key before a false beacon that has passed events of it which did not arrive."""
        passed = self._passed.get(envelope.key, NUMBER_MAX)
        is_hidden = passed < envelope.previous <= self.covered and envelope.key not in self._last
        return passed if is_hidden and self.has_log else None

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
            self._context.report_late(envelope, self.link)
            return False
        return True

    # Called by its claims.

    def is_missing(self, envelope: Envelope) -> bool:
        """Return whether an event of a page did not arrive, although this node wants it."""
        since = self._context.interest.of(envelope.key).since
        return not self._predates_interest(envelope, since) and not self._is_known(envelope)

    def confirmed_up_to(self, offset: int) -> None:
        """Note that the log has confirmed a position."""
        self._covered = max(offset, self._covered or 0)

    def go_back(self, offset: int | None) -> None:
        """Forget everything after a confirmed position, and request it again."""
        self._last.clear()
        self._pending = None
        if self.has_log:
            self._covered = offset
            self._repair()
        else:
            self._covered, self._settling_beacons = 0, 2

    # Beacons.

    def _missing(self, beacon: Beacon) -> list[str]:
        covered, interest = self._covered or 0, self._context.interest
        return [
            key
            for key, (offset, *identity) in beacon.newest.items()
            if (offset > self._expected_after(key, covered) or (offset > covered and self._is_unknown(*identity)))
            and interest.of(key).since != NEVER
        ]

    def _is_unknown(self, publisher_id: int, sequence: int) -> bool:
        """Return whether an event did not arrive, although another one claimed a later offset on its key."""
        known = self._context.look_up(publisher_id, sequence)
        return not self._gave_up and known in (Arrival.NEW, Arrival.SKIPPED)

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
        named = max([offset for offset, _, _ in beacon.newest.values()], default=0)
        self._claims.believe(beacon.head, beacon.digest if named == beacon.head else b"")
        head = min(beacon.head, named) if self.has_log else beacon.head
        if len(self._passed) + len(self._last) > KEYS_MAX:
            self._passed.clear()
        self._passed |= {key: offset for key, offset in self._last.items() if offset <= head}
        self._advance(head)

    def _advance(self, head: int) -> None:
        self._covered, self._pending = max(head, self._covered or 0), None
        self._covered_at = self._time_ns()
        self._gave_up = False
        self._last = {key: offset for key, offset in self._last.items() if offset > head}
        self._claims.advanced(self._covered)

    def _bound_keys(self) -> None:
        """Forget the older half of the keys if there are too many, as of a peer that sends no beacons.

        The next event of such a key looks like one after a gap, and is compared with the peer's log.
        """
        if len(self._last) > KEYS_MAX:
            evicted = len(self._last) // 2
            self._last = dict(islice(self._last.items(), evicted, None))
            self._context.count("peer_keys_evicted", evicted)

    # Repair.

    def _repair(self) -> None:
        if self._repairing is None:
            self._pending = None
            self._passed.clear()
            self._claims.repair_begins()
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
                if self._covered is None and (self._claims.known or not self._skew.is_known):
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
                pauses = Backoff(*RETRY_S, uniform=self._runtime.uniform)
            except Exception as error:
                pause = pauses.next()
                if not isinstance(error, RequestError):  # no responders, or a timeout: expected, so only retry
                    bug = None if isinstance(error, ZbusError) else error
                    again: dict[str, Any] = {"origin": self.id, "again_in_s": round(pause, 3)}
                    record_reason(EVENT_RETRY, logging.WARNING, bug, code="repair_failed", reason=str(error), **again)
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
                    if not failed:
                        pauses = Backoff(*RETRY_AWAY_S, uniform=self._runtime.uniform)
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
        return self._complete and nothing_else and self._buffered.evicted_up_to <= (self._covered or 0)

    async def _compare(self) -> None:
        """Ask the log for the offset that it shares with the known incarnations, and for the time of its clock."""
        asked_at = self._time_ns()
        page, known = await self._claims.compare()
        self._skew.measure(page.now_ns, asked_at)
        if known:
            self._covered = self.confirmed

    async def _page(self) -> Sequence[Envelope]:
        """Request the next page, deliver its new events in order, and wait until they are stored. Return them."""
        after, interest = self._covered or 0, self._context.interest
        # A new peer is asked by time instead of offset: by its own clock.
        from_ns = 0
        if self._covered is None and interest.earliest:
            from_ns = max(0, min(interest.earliest + self._skew.ns, self._clock_ns))
        link, asked_at, heads, mark = self.link, self._time_ns(), self._claims.heads, self._claims.mark
        page = await self._context.page(self.id, after, from_ns, link, incarnation=self.branch.id, mark=mark)
        self._claims.replied(page)
        if mark is not None and (shared := self._claims.compared(page)) is not None:
            # Events that were published before this node wanted them are left out, as for a new peer.
            self._rewind_to, self._covered_at, self._complete = shared, 0, False
            return ()
        self._skew.measure(page.now_ns, asked_at)
        self._claims.compare_heads(heads, page, link)
        if self._claims.is_shorter(page):
            self._rewind_to, self._complete = page.head, False
            return ()
        self._check_page(page, after)
        # A new peer may have removed events before the first contact, which a stored key was waiting for.
        trimmed = page.low_water > after and (self._covered is not None or bool(self._last) or self._lacks(page))
        new: list[Envelope] = []
        for envelope in page.envelopes:
            if self._predates_interest(envelope, interest.of(envelope.key).since):
                continue
            passed = envelope.offset <= self._last.get(envelope.key, 0)
            if envelope.offset > after and (not passed or self._was_never_seen(envelope)):
                new.append(envelope)
        reported = trimmed and await self._accept_buffered(page.low_water)
        if page.skipped:
            new = self._buffered.merged(new, page.covered)
        if trimmed:
            self._trimmed = TrimmedRanges(self.id, page.low_water, self._context, self._runtime)
        reported = (self._trimmed is not None and self._trimmed.report(new)) or reported
        if trimmed and not reported and self._trimmed is not None:
            self._trimmed.report_range(after)
        await self._context.wait_for_capacity()
        stored = self._context.accept(new, link, repaired=True)
        if stored is not None:
            await stored
        for envelope in new:
            self._last[envelope.key] = max(envelope.offset, self._last.get(envelope.key, 0))
        self._covered = self._claims.confirmed = max(after, page.covered)
        self._complete = page.covered >= page.head
        self._buffered.remove_supplied(self._covered, self._is_known)
        return new

    def _lacks(self, page: LogPage) -> bool:
        """Return whether a new peer has removed events that this node may have had to store."""
        interest = self._context.interest
        wanted = [interest.of(each.key) for each in page.envelopes] if page.lacks else []
        return any(each.stored and each.since <= interest.earliest for each in wanted)  # the request began then

    async def _accept_buffered(self, until: int) -> bool:
        """Deliver the buffered events up to an offset, which the log no longer has. Report what is missing before them.

        Return whether anything is.
        """
        stored: Awaitable[object] | None = None
        reported = False
        for envelope, link in self._buffered.by_offset():
            if envelope.offset <= until and not self._is_known(envelope):
                identity = (envelope.publisher_id, envelope.sequence)
                reported = self._context.report_gap(self.id, envelope.key, *identity) or reported
                stored = self._context.accept([envelope], link, repaired=True) or stored
        if stored is not None:
            await stored
        return reported

    def _was_never_seen(self, envelope: Envelope) -> bool:
        """Return whether an event is missing, although another one claimed a later offset on its key."""
        arrival = self._context.look_up(envelope.publisher_id, envelope.sequence)
        return arrival is Arrival.NEW or (arrival is Arrival.SKIPPED and self._context.interest.of(envelope.key).stored)

    def _is_known(self, envelope: Envelope) -> bool:
        return self._context.look_up(envelope.publisher_id, envelope.sequence) is Arrival.DUPLICATE

    def _check_page(self, page: LogPage, after: int) -> None:
        """Report corrupt events that the peer left out. Raises `TransportError` if the page does not advance."""
        if page.covered > page.head:
            raise TransportError(f"the page covers offset {page.covered}, but the log ends with {page.head}")
        if page.covered <= after and page.covered < page.head:
            reason = f"the page after offset {after} covers nothing, although the log reaches {page.head}"
            raise TransportError(reason)
        if page.skipped:
            self._gap_ledger.report_corrupt(after, page.covered, page.skipped)

    def _predates_interest(self, envelope: Envelope, since: int) -> bool:
        """Return whether an event was published before this node wanted its key.

        The peer's clock decides only if nothing else can: for a new peer or a new expression.
        """
        if envelope.key in self._last or (self._covered is not None and since <= self._covered_at):
            return False
        return envelope.published_at < since + self._skew.ns

    async def _fetch(self, expression: str, after: int) -> None:
        """Deliver everything that the log has for an expression. Events that are known already are duplicates."""
        link, interest = self.link, self._context.interest
        while True:
            page = await self._context.page(self.id, after, 0, link, (expression,), incarnation=self.branch.id)
            self._check_page(page, after)
            wanted = [
                each
                for each in page.envelopes
                if each.published_at >= interest.of(each.key).since + min(0, self._skew.ns)
            ]
            if 0 < after < page.low_water:  # retention removed some of what was owed
                trimmed = TrimmedRanges(self.id, page.low_water, self._context, self._runtime)
                if not trimmed.report(wanted):
                    trimmed.report_range(after)
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
        buffered = self._buffered.take()
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
                self._buffered.add([envelope], link)
                continue
            if envelope.previous > seen or link != run_link:
                self._context.accept(run, run_link)
                run, run_link = [], link
            if envelope.previous > seen:
                self._context.report_gap(self.id, envelope.key, envelope.publisher_id, envelope.sequence)
                given_up = max(given_up, envelope.previous)
            self._last[envelope.key] = envelope.offset
            if self._is_missed(envelope):  # otherwise events of another incarnation of the log came first
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
        self._buffered.evicted_up_to, self._repairing = 0, None
        if self.has_log:  # otherwise every beacon would request the lost events again
            self._covered = self._claims.settled_up_to(given_up, fresh, self._last.values(), TAIL_S)
            self._gave_up = True
            if fresh:  # its last beacon is recent: the events that it names may still be in flight
                head = max(offset for offset, _, _ in fresh.values())
                self.beacon(Beacon(self.id, self._covered, head, fresh), self.link)

    def _take_unbroken(self, envelopes: Sequence[Envelope], link: str) -> list[Envelope]:
        """Return the events whose predecessors arrived, and buffer the others, while the peer has open gaps."""
        new: list[Envelope] = []
        for envelope in envelopes:
            seen = self._reached(envelope.key)
            if envelope.offset <= seen:
                if self._is_missed(envelope):
                    new.append(envelope)
            elif envelope.previous > seen:
                self._buffered.add([envelope], link)
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
        buffered = self._buffered.take()
        self._buffered.evicted_up_to, self._repairing = 0, None
        for link, items in groupby(buffered, key=lambda item: item[1]):
            envelopes = [envelope for envelope, _ in items]
            self._context.accept(self.take(envelopes, link), link)
        if self._repairing is None:
            self._advance(self._covered or 0)


def _identity(envelope: Envelope) -> tuple[int, int]:
    return envelope.publisher_id, envelope.sequence
