"""The inbox: takes frames of other nodes from the fabrics' threads to the loop, and wakes the loop once per burst.

New events go to the subscriptions. Events that this node stores go to its log first, and the log feeds the
subscriptions. Each incarnation of a sender's log is a `Peer`, which detects and repairs gaps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from zbus.errors import EventInvalid, KeyInvalid, LogError
from zbus.event import Event
from zbus.observe.records import (
    EVENT_DROPPED,
    EVENT_GAP,
    EVENT_INVALID,
    ORIGIN_CLONED,
    ORIGIN_REWOUND,
    ORIGIN_UNCONFIRMED,
    record,
    record_reason,
)
from zbus.observe.throttle import Throttle
from zbus.ports.fabric import Receive
from zbus.ports.lineage import Branch, Mark
from zbus.ports.log import Row, Stored
from zbus.util.mailbox import Mailbox
from zbus.util.memo import Memo
from zbus.util.runtime import Runtime
from zbus.wire.beacon import decode_beacon
from zbus.wire.envelope import BEACON, CANCEL, MANY, NODE, ONE, Envelope, events_in, open_frame

from .buffered_events import BufferBudget
from .dedup import Arrival, Dedup
from .host import Host, Receives
from .interest import NO_INTEREST, Interest
from .log_service import NOTHING_KNOWN
from .origins.incarnations import Incarnations
from .origins.known_logs import INCARNATIONS_MAX, KnownLogs
from .origins.received_sequences import ReceivedSequences
from .origins.sequence_marks import SequenceMarks
from .peer import Peer

INBOX_BYTES_MAX = 64 * 1024 * 1024
TURN_FRAMES, TURN_BYTES = 256, 256 * 1024  # at most this much in one turn of the loop
PEERS_MAX = 10_000
REPORT_S = 60.0
CANCEL_BYTES = 9  # the kind of the frame, and the id of the request

Frame = tuple[bytes, Callable[[], None] | None, str, bool, bool]


class Inbox:
    """Receives everything from other nodes. Lives on the loop; only what `receiver` returns is called on any thread."""

    def __init__(
        self,
        host: Host,
        network: Receives,
        own: int,
        interest: Interest,
        payload_bytes_max: int,
        forwards: bool,
        runtime: Runtime,
    ) -> None:
        self.interest, self.count = interest, host.count  # peers use them
        self.page, self.describe = network.page, network.describe
        self._own, self._network, self._forwards = own, network, forwards
        self._deliver, self._commits, self._passed = host.dispatcher.unstored, host.commits, host.dispatcher.passed
        self._payload_bytes_max, self._backpressure = payload_bytes_max, host.backpressure
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox[Frame](
            self._loop, self._drain, INBOX_BYTES_MAX, _size, TURN_FRAMES, TURN_BYTES, _events, self._is_ready
        )
        self._ended = False
        self._resuming: asyncio.Task[None] | None = None  # set while backpressure delays received frames
        self._seen = Dedup(lambda: self.count("publishers_evicted", 1))
        self._batch: list[Envelope] = []  # events of this turn that are not accepted yet
        self._batch_done: list[Callable[[], None]] = []  # acknowledge their frames
        self._batch_link = ""
        self._opened: dict[int, int] = {}  # the highest sequence of each publisher in this turn, before deduplication
        self._peers = Memo[tuple[int, int], Peer](PEERS_MAX, on_evict=self._evict_peer)  # by origin and incarnation
        self._of_origin: dict[int, list[Peer]] = {}
        self._incarnations = Incarnations(runtime.monotonic, self._report_copies)
        self.buffer_budget = BufferBudget()
        self._rewinds = Memo[tuple[int, int], tuple[int, int]](PEERS_MAX)  # known and shared offset, until it is proven
        self.known_logs = KnownLogs()
        self._throttle = Throttle(REPORT_S, runtime.monotonic)
        self._gap_throttle = Throttle(REPORT_S, runtime.monotonic)  # of its own: gaps silence no other record
        self._runtime = runtime
        self.stored_events = 0  # of other nodes, in the log of this one
        self.received: dict[str, int] = {}  # events by link, including duplicates
        self.sequence_marks = SequenceMarks(runtime)
        self.received_sequences = ReceivedSequences()
        self._undelivered: set[tuple[int, int]] = set()  # new identities that are being stored
        self._storing: dict[int, asyncio.Future[Any]] = {}  # per origin: the last batch that is not stored yet
        self._failures = Counter[int]()  # per origin: how many batches were not stored

    def receiver(self, link: str, dense: bool, events_only: bool = False) -> Receive:
        """Return the callback for a fabric. It queues the frame and wakes the loop.

        No log can be asked over a link that carries only events, so its events are delivered as they arrive.
        """

        post = self._mailbox.post

        def receive(frame: bytes, done: Callable[[], None] | None = None) -> None:
            post((frame, done, link, dense, events_only))

        return receive

    def interest_changed(self) -> None:
        """Note that the key expressions of this node have changed."""
        for peer in self._peers.values():
            peer.interest_changed()

    def fetch_past(self, expressions: Sequence[str]) -> dict[str, int]:
        """Request the past events of these expressions from every log that is known. Returns the names to store."""
        owed = self.known_logs.owe(expressions, self.other_logs())
        for peer in self._peers.values():
            if not peer.fetch_past(expressions):
                for each in expressions:
                    self.known_logs.fetched(peer.id, each, None)
        return {name: value for name, value in self.known_logs.names().items() if name in owed}

    def node_announced(self, origin: int) -> None:
        """Note that a node is connected: what its log did not answer is requested again at once."""
        for peer in self._of_origin.get(origin, ()):
            peer.seen()

    def other_logs(self) -> tuple[int, ...]:
        """Return the logs of other nodes that were seen since the start. May be called on any thread."""
        return tuple(each for each in list(self._of_origin) if each & 1)

    def copies_of(self, origin: int, incarnation: int) -> tuple[int, ...]:
        """Return the other incarnations of a log that are in use at the same time as this one."""
        return self._incarnations.copies_of(origin, incarnation)

    def close(self) -> list[asyncio.Task[None]]:
        """Ignore further frames and stop all repairs. Return the tasks to wait for."""
        self._ended = True  # a frame that still arrives would start a repair
        ending = [task for peer in self._peers.values() for task in peer.close()]
        if self._resuming is not None:
            self._resuming.cancel()
            ending.append(self._resuming)
        self._peers.clear()
        self._of_origin.clear()
        return ending

    # On the loop.

    def _drain(self, frames: Sequence[Frame]) -> None:
        if self._ended:
            return
        for frame, acknowledge, link, dense, events_only in frames:
            # A beacon moves the position of its node past the events before it: those must be with the log by then.
            if link != self._batch_link or acknowledge is not None or _kind(frame) == BEACON:
                self._hand_over()
                self._batch_link = link
            try:
                self._batch += self._open(frame, link, dense, events_only)
            except EventInvalid as error:
                self._invalid(_reason(frame, error), link, str(error))
            except Exception as error:  # a bug here must not stop later frames
                self.count("receive_errors", 1)
                if self._throttle.due(("RECEIVE_FAILED", link)):
                    record("RECEIVE_FAILED", logging.WARNING, error, link=link)
            if acknowledge is not None:
                self._batch_done.append(acknowledge)
        self._hand_over()
        self._opened.clear()
        if lost := self._mailbox.take_overflowed():
            self.count("dropped_inbox_full", lost)
            self._report(
                EVENT_DROPPED,
                "",
                code="inbox_full",
                reason="the inbox is full; events that their publisher's log has are requested again",
                events=lost,
            )

    def _is_ready(self) -> bool:
        """Return whether to take frames now. If not, schedule it for when the backpressure ends."""
        if not self._backpressure.applies(self._is_delayed):
            return True
        self._resuming = self._loop.create_task(self._resume())
        return False

    def _is_delayed(self, reasons: AbstractSet[Any]) -> bool:
        """Return whether received events must wait: for the log, or for the links that a bridge forwards them over.

        A full subscription does not delay them: its events wait in its own backlog, and the others are delivered.
        """
        return not self._ended and (self._commits in reasons or (self._forwards and self._network in reasons))

    async def _resume(self) -> None:
        await self._backpressure.wait(self._is_delayed)
        self._resuming = None
        self._mailbox.resume()

    def _open(self, frame: bytes, link: str, dense: bool, events_only: bool) -> Sequence[Envelope]:
        kind = _kind(frame)
        if kind == BEACON:
            beacon = decode_beacon(frame)
            if self._is_refused(beacon.origin, beacon.branch):
                return ()
            if beacon.origin != self._own or self._network.is_copy(beacon.branch, beacon.head, beacon.digest):
                self.sequence_marks.note_beacon(beacon, self.interest)
                self._network.beacon_received(beacon.origin, beacon.branch.id)
                self._peer(beacon.origin, beacon.branch, beacon.head).beacon(beacon, link)
                self._incarnations.check(beacon.origin, beacon.branch, beacon.head, beacon.digest)
            return ()
        if kind == CANCEL:
            if len(frame) < CANCEL_BYTES:
                raise EventInvalid(f"malformed cancellation: {len(frame)} bytes")
            self._network.request_cancelled(int.from_bytes(frame[1:CANCEL_BYTES]))
            return ()
        if kind == NODE:
            self._network.announcement_received(frame, link)
            return ()
        envelopes = open_frame(frame)
        if not envelopes:
            return ()
        first = envelopes[0]
        if first.origin == self._own and not self._network.is_copy(first.branch, first.offset):
            return ()
        if first.origin == 0 or events_only:
            if dense:
                self._report_sequence_gaps(envelopes)
            return envelopes
        if self._is_refused(first.origin, first.branch):
            return ()
        if any(envelope.origin != first.origin for envelope in envelopes):
            raise EventInvalid("malformed frame: its envelopes come from several nodes")
        return self._peer(first.origin, first.branch, envelopes[-1].offset).take(envelopes, link)

    def _is_refused(self, origin: int, branch: Branch) -> bool:
        """Return whether a frame comes from a node that was refused. It is counted, and its node is not asked again."""
        if not self._network.is_refused(origin, branch.id):
            return False
        self.count("frames_refused", 1)
        if (peer := self._peers.get((origin, branch.id))) is not None:  # of frames before its announcement
            self._close_peer(peer)
        return True

    def _hand_over(self) -> None:
        """Accept the events that were taken from frames, and acknowledge those frames."""
        new, done, link = self._batch, self._batch_done, self._batch_link
        if not new and not done:
            return
        self._batch, self._batch_done = [], []
        stored = self.accept(new, link)

        def acknowledge(future: asyncio.Future[Any] | None = None) -> None:
            if future is None or (not future.cancelled() and future.exception() is None):
                for each in done:
                    self._acknowledge(each, link)

        if done:
            stored.add_done_callback(acknowledge) if stored is not None else acknowledge()

    def _acknowledge(self, acknowledge: Callable[[], None], link: str) -> None:
        try:
            acknowledge()
        except Exception as error:  # of the transport: it must not stop later frames
            self.count("acknowledge_errors", 1)
            if self._throttle.due(("acknowledge_failed", link)):
                reason = str(error) or type(error).__name__
                record_reason(
                    "RECEIVE_FAILED", logging.WARNING, error, code="acknowledge_failed", reason=reason, link=link
                )

    def _peer(self, origin: int, branch: Branch, offset: int) -> Peer:
        """Return the peer that has the events of an incarnation up to an offset."""
        if not branch.id and (known := self._of_origin.get(origin)):  # only version 0.1 does not name it
            branch = next((each.branch for each in reversed(known) if each.is_proven), known[-1].branch)
        peer = self._peers.get((origin, branch.id))
        if peer is not None and len(self._of_origin[origin]) == 1:
            self._peers.move_to_end((origin, branch.id))
            return peer
        return self._peer_of_several(origin, branch, offset)

    def _peer_of_several(self, origin: int, branch: Branch, offset: int) -> Peer:
        self._incarnations.add(origin, branch)
        # Late events of an incarnation that has ended belong to the one that continues it.
        branch = self._incarnations.current(origin, branch, offset)
        key = (origin, branch.id)
        if key not in self._peers:
            others = self._of_origin.get(origin, [])
            peer = self._new_peer(origin, branch, others)
            if len(others) >= INCARNATIONS_MAX:
                self._close_peer(next((each for each in others if not each.is_proven), others[0]))
                others = self._of_origin[origin]
            self._of_origin[origin] = [*others, peer]
            self._peers[key] = peer
            if others or self.known_logs.mark(origin, branch) is not None:
                peer.ask()  # its log may end the others, or may have been reverted since it was last asked
        return self._peers.use(key)

    def _new_peer(self, origin: int, branch: Branch, others: Sequence[Peer]) -> Peer:
        known = self.known_logs.of(origin)
        known = known | {each.branch.id: each.confirmed for each in others if each.confirmed is not None}
        known = self.known_logs.certain(origin, known)
        shared = branch.shared(known)
        reach = max([*known.values(), *[each.reach for each in others]], default=0)
        is_copied = self.known_logs.is_split(origin, branch.parent)  # then it is reported already
        if branch.first and branch.id not in known and reach > branch.before and not is_copied:
            self._rewinds[origin, branch.id] = (reach, branch.before)
        unknown = known if shared is None else NOTHING_KNOWN
        owed, mark = self.known_logs.owed_by(origin), self.known_logs.mark(origin, branch)
        return Peer(origin, self, shared, self._runtime, branch, unknown, owed, mark)

    def proven(self, origin: int, incarnation: int, shared: int) -> None:
        """Note that a log has replied, and shares at most this offset with what was known.

        The first time, its other incarnations are taken to have ended. If the log was copied, their next frames show
        it, and then they are no longer ended.
        """
        peer = self._peers.get((origin, incarnation))
        if peer is None or not self._incarnations.prove(origin, incarnation):
            return
        for other in [each for each in self._of_origin.get(peer.id, ()) if each is not peer]:
            if other.confirmed is not None:
                self.known_logs.settled(peer.id, other.branch.id, other.confirmed)
            if not self.known_logs.is_split(origin, other.branch.id):
                peer.succeed(other)
            self._close_peer(other)
        if (rewind := self._rewinds.pop((peer.id, peer.branch.id), None)) is not None:
            self.report_rewound(peer.id, peer.branch, rewind[0], min(rewind[1], shared))

    def _close_peer(self, peer: Peer) -> None:
        del self._peers[peer.id, peer.branch.id]
        peer.close()
        self._remove_peer(peer)

    def _remove_peer(self, peer: Peer) -> None:
        others = [each for each in self._of_origin.pop(peer.id, ()) if each is not peer]
        if others:
            self._of_origin[peer.id] = others

    def _evict_peer(self, _: tuple[int, int], peer: Peer) -> None:
        peer.close()
        self._remove_peer(peer)
        self.count("peers_evicted", 1)

    def _report_sequence_gaps(self, envelopes: Sequence[Envelope]) -> None:
        """Report gaps in the sequences of a publisher whose node has no id, and so cannot be asked to repair them."""
        for envelope in envelopes:
            publisher_id, sequence = envelope.publisher_id, envelope.sequence
            last = self._opened.get(publisher_id, self._seen.last(publisher_id))
            if last is not None and sequence > last + 1:
                self.report_gap(0, envelope.key, publisher_id, sequence, after=last)
            self._opened[publisher_id] = sequence if last is None else max(last, sequence)

    def _invalid(self, counter: str, source: str, reason: str, **fields: Any) -> None:
        self.count("invalid_received", 1)  # the total of all kinds
        self.count(counter, 1)
        self._report(EVENT_INVALID, source, code=counter, reason=reason, link=source, **fields)

    def _report(self, name: str, source: str, *, code: str, reason: str, **fields: Any) -> None:
        """Write a log record, at most once per minute and source. The counters count every occurrence."""
        if self._throttle.due((name, source)):
            record_reason(name, logging.WARNING, code=code, reason=reason, **fields)

    def _count_known(self, arrival: Arrival, envelope: Envelope, link: str, stored: bool) -> None:
        """Count an event that is not delivered live. `stored` means that the log has it in any case."""
        if arrival is Arrival.DUPLICATE or stored:
            self.count("duplicates_received", 1)
            return
        self.count("dropped_late", 1)
        reason = "events are so late that they cannot be distinguished from duplicates"
        self._report(EVENT_DROPPED, f"late {link}", code="late", reason=reason, link=link, key=envelope.key)

    # Called by peers.

    def accept(self, envelopes: Sequence[Envelope], link: str, repaired: bool = False) -> asyncio.Future[Any] | None:
        """Deliver new events, and store those that this node stores. The future completes when they are stored."""
        rows: list[Row] = []
        events: list[Event] = []
        stored: list[Envelope] = []
        passed: list[tuple[int, int]] = []  # events that live subscriptions had already, or do not want
        forwarded: list[Row] | None = [] if self._forwards else None
        self.received[link] = self.received.get(link, 0) + len(envelopes)
        own, interest_in, arrival_of = self._own, self.interest.of, self._seen.arrival
        key, wanted = "", NO_INTEREST
        for envelope in envelopes:
            if envelope.via and own in envelope.via:
                self.count("loops_prevented", 1)
                continue
            if len(envelope.payload) > self._payload_bytes_max:
                self._invalid("invalid_too_large", link, "the payload is over the limit", key=envelope.key)
                continue
            arrival = arrival_of(envelope.publisher_id, envelope.sequence)
            new = arrival is Arrival.NEW
            if envelope.key != key:
                key, wanted = envelope.key, interest_in(envelope.key)
            if wanted.stored:
                rows.append(envelope.row(link))
                stored.append(envelope)
                identity = _identity(envelope)
                if new:
                    self._undelivered.add(identity)
                else:
                    self._count_known(arrival, envelope, link, repaired)
                if identity not in self._undelivered or (repaired and envelope.published_at < wanted.live_since):
                    passed.append(identity)
            elif not new:
                self._count_known(arrival, envelope, link, False)
            else:
                events.append(envelope.event())
                if forwarded is not None:
                    forwarded.append(envelope.row(link))
        if events:
            self._deliver(events)
        if forwarded:
            self._network.forward_unstored(forwarded, link)
        if not rows:
            return None
        self._passed.update(passed)
        storing = self._store(rows, stored, passed)
        if forwarded is not None:
            self._network.forward_when_stored(rows, link, storing)
        return storing

    async def wait_for_capacity(self) -> None:
        """Wait while too many bytes await commit or, in a bridge, await sending."""
        await self._backpressure.wait(self._is_delayed)

    def look_up(self, publisher_id: int, sequence: int) -> Arrival:
        """Return what is known of an identity, with the events of this turn."""
        if self._batch:
            self._hand_over()
        return self._seen.look_up(publisher_id, sequence)

    def report_late(self, envelope: Envelope, link: str) -> None:
        """Report an event that is dropped, because later events of its publisher were delivered."""
        self._count_known(Arrival.LATE, envelope, link, False)

    def past_fetched(self, origin: int, expression: str, reached: int | None) -> None:
        """Note how far the past events of an expression were fetched; None: all of them."""
        self.known_logs.fetched(origin, expression, reached)

    def report_rewound(self, origin: int, branch: Branch, known: int, shared: int) -> None:
        """Report that a log was replaced by an older one: with a counter and a log record."""
        self.known_logs.rewound(origin, shared)
        self.count("origins_rewound", 1)
        reason = (
            f"the log was known up to offset {known} and now continues after offset {shared}: it was restored from a "
            "backup, or copied. Its new events are received; the nodes that received the lost ones still have them"
        )
        fields = {"origin": f"{origin:x}", "incarnation": f"{branch.id:x}", "known": known, "shared": shared}
        record_reason(ORIGIN_REWOUND, logging.WARNING, code="log_rewound", reason=reason, **fields)

    def report_unconfirmed(self, origin: int, claimed: int, head: int, link: str) -> None:
        """Report a position that a log has not reached: with a counter and a log record."""
        self.count("claims_unconfirmed", 1)
        reason = "a beacon or an event named an offset that its log does not have; it is ignored"
        if self._throttle.due((ORIGIN_UNCONFIRMED, origin)):
            fields = {"origin": f"{origin:x}", "claimed": claimed, "head": head, "link": link}
            record_reason(ORIGIN_UNCONFIRMED, logging.WARNING, code="claim_unconfirmed", reason=reason, **fields)

    def _report_copies(self, origin: int, one: int, other: int) -> None:
        """Report that two copies of a log are in use: with a counter and a log record."""
        if one == other and (branch := self._incarnations.branch(origin, one)) is not None:
            self.split(origin, one, branch.before)
        self.count("copies_found", 1)
        reason = (
            "two nodes use copies of one log. The events of both are received, each as a log of its own. Close one of "
            "the nodes, or give it a log of its own"
        )
        fields = {"origin": f"{origin:x}", "incarnation": f"{one:x}", "other": f"{other:x}"}
        record_reason(ORIGIN_CLONED, logging.ERROR, code="log_copied", reason=reason, **fields)

    def covered(self, origin: int, branch: Branch, offset: int) -> None:
        """Remember that nothing of a log up to `offset` is missing, once the earlier events are stored.

        A node without a log has another origin after each start, and nothing can be requested from it.
        """
        if not origin & 1:
            return
        storing, failures = self._storing.get(origin), self._failures[origin]

        def remember(_: asyncio.Future[Any] | None = None) -> None:
            if self._failures[origin] == failures:
                if branch.parent != branch.id:  # its events up to this one are those of its parent
                    self.known_logs.reached(origin, branch.parent, min(offset, branch.before))
                self.known_logs.reached(origin, branch.id, offset)

        storing.add_done_callback(remember) if storing is not None else remember()

    def marked(self, origin: int, mark: Mark, confirmed: bool) -> bool:
        """Return whether to compare a mark later. It is stored if the log itself has named it."""
        if self.known_logs.is_split(origin, mark.incarnation):
            return False
        if confirmed:
            self.known_logs.marked(origin, mark)
        return True

    def split(self, origin: int, incarnation: int, before: int) -> None:
        """Note that an incarnation of a log has two histories, which are the same up to an offset."""
        self.known_logs.split(origin, incarnation, before)
        for peer in self._of_origin.get(origin, ()):
            if peer.branch.parent == incarnation != peer.branch.id:
                peer.distrust(before)

    def report_gap(
        self, origin: int, key: str, publisher_id: int, sequence: int, counted: bool = False, after: int = -1
    ) -> bool:
        """Report lost events: with the counters, a log record, and an event on `@zbus/gap`."""
        missing = self._missing(key, publisher_id, after, sequence)
        if missing is None:
            return False
        if not counted:
            self.count("gaps", 1)
            self.count("gaps_unrepaired", 1)
        reason = "events are missing and could not be repaired"
        self._report_missing(origin, missing, is_open=False, code="gap_unrepaired", reason=reason)
        return True

    def report_open_gap(self, origin: int, key: str, publisher_id: int, after: int, sequence: int) -> bool:
        """Report missing events as an open gap. They are requested until their node is back."""
        missing = self._missing(key, publisher_id, after, sequence)
        if missing is None:
            return False
        self.count("gaps_open", 1)
        reason = "events are missing and their node does not reply; they are requested until it is back"
        self._report_missing(origin, missing, is_open=True, code="gap_open", reason=reason)
        return True

    def _missing(self, key: str, publisher_id: int, after: int, sequence: int) -> dict[str, Any] | None:
        """Return the events before `sequence` that were not received, or None if there are none."""
        last = self._seen.last(publisher_id)
        if last is None:
            last = self.received_sequences.until(publisher_id)
        skipped = self._seen.skipped_before(publisher_id, sequence)
        if skipped is not None:  # later events came over another link
            last = skipped - 1
        first = max(after, last) + 1
        if first >= sequence:
            return None
        return {"publisher_id": publisher_id, "first": first, "last": sequence - 1, "key": key}

    def _report_missing(self, origin: int, missing: dict[str, Any], *, is_open: bool, code: str, reason: str) -> None:
        """Publish each gap as an event, and log one per minute and publisher."""
        if self._gap_throttle.due((code, missing["publisher_id"])):
            record_reason(EVENT_GAP, logging.WARNING, code=code, reason=reason, origin=origin, **missing)
        self._deliver([gap_event(missing | {"open": is_open}, self._runtime.time_ns())])

    def _store(
        self, rows: list[Row], envelopes: Sequence[Envelope], passed: Sequence[tuple[int, int]]
    ) -> asyncio.Future[Any]:
        assert self._commits is not None
        stored = self._commits.add_many(rows)
        origins = {envelope.origin: None for envelope in envelopes if envelope.origin & 1}
        self._storing.update(dict.fromkeys(origins, stored))
        covered = [(peer, peer.covered) for origin in origins for peer in self._of_origin.get(origin, ())]

        def finish(done: asyncio.Future[Any]) -> None:
            for origin in origins:
                if self._storing.get(origin) is stored:
                    del self._storing[origin]
            self._passed.difference_update(passed)
            undelivered = self._undelivered.intersection(map(_identity, envelopes))
            self._undelivered -= undelivered
            if not done.cancelled() and done.exception() is None:
                self.stored_events += len(rows) - len(done.result().repeated)
                for publisher_id, sequence in {row.publisher_id: row.sequence for row in rows}.items():
                    until = min(sequence, self._seen.unbroken_until(publisher_id))
                    self.received_sequences.stored(publisher_id, until)
                if done.result().conflicts:
                    self._report_conflicts(rows, done.result())
                return
            self._failures.update(origins.keys())
            for identity in undelivered:
                self._seen.forget(*identity)
            if not done.cancelled() and isinstance(done.exception(), LogError):
                self.count("store_failed", len(rows))
                self._report(
                    EVENT_DROPPED,
                    "log",
                    code="store_failed",
                    reason=f"not stored: {done.exception()}",
                    events=len(rows),
                )
                for peer, offset in covered:
                    if peer in self._of_origin.get(peer.id, ()):
                        peer.rewind(offset)

        stored.add_done_callback(finish)
        return stored

    def _report_conflicts(self, rows: Sequence[Row], stored: Stored) -> None:
        """Report received events that were not stored, because the log has another event under their identity."""
        self.count("identity_conflicts", len(stored.conflicts))
        for index, key in stored.conflicts.items():
            row = rows[index]
            origin = row.provenance.origin if row.provenance is not None else 0
            if self._throttle.due(("identity_conflict", origin)):
                record_reason(
                    EVENT_DROPPED,
                    logging.ERROR,
                    code="identity_conflict",
                    reason="a received event was not stored: the log has another event under its identity",
                    events=len(stored.conflicts),
                    origin=f"{origin:x}",
                    publisher_id=row.publisher_id,
                    sequence=row.sequence,
                    key=row.key,
                    stored_key=key,
                    offset=stored.offsets[index],
                )


def _kind(frame: bytes) -> int:
    return frame[0] if frame else 0


def _identity(envelope: Envelope) -> tuple[int, int]:
    return envelope.publisher_id, envelope.sequence


def _size(frame: Frame) -> int:
    return len(frame[0])


def _events(frame: Frame) -> int:
    return events_in(frame[0])


def _reason(frame: bytes, error: EventInvalid) -> str:
    """Return the counter for a malformed frame."""
    kind = frame[0] if frame else ONE
    if kind in (ONE, MANY):
        return "invalid_key" if isinstance(error.__cause__, KeyInvalid) else "invalid_envelope"
    return {BEACON: "invalid_beacon", CANCEL: "invalid_cancel", NODE: "invalid_node"}.get(kind, "invalid_version")


def gap_event(fields: dict[str, Any], now_ns: int) -> Event:
    """Return the event that reports a gap."""
    import msgspec

    return Event(0, 0, now_ns, "@zbus/gap", msgspec.json.encode(fields), {"content-type": "application/json"})
