"""Gaps in the events of one peer: those that its log cannot fill now, and those that its retention made permanent.

Events may be lost on the way from a node that then stays disconnected for a long time, or forever. A durable
subscription needs every event, so for keys that this node stores, later events wait until the gap is repaired. Each
such gap is reported once, and counted as open until then. Only beacons reveal that the last events of a key are
missing, so the ledger keeps what they name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from zbus.observe.records import EVENT_GAP, record_reason
from zbus.util.runtime import Runtime
from zbus.wire.beacon import Newest
from zbus.wire.envelope import Envelope

from .interest import NEVER, Interest

KEYS_MAX = PUBLISHERS_MAX = 10_000


class GapReporter(Protocol):
    """Reports gaps to users, and counts them."""

    interest: Interest

    def report_gap(self, origin: int, key: str, publisher_id: int, sequence: int, counted: bool = False) -> bool:
        """Report that the events of a publisher before `sequence` that were not received are lost.

        Return whether there are any. `counted` means that the counters include the gap already.
        """

    def report_open_gap(self, origin: int, key: str, publisher_id: int, after: int, sequence: int) -> bool:
        """Report that events between `after` and `sequence` (both exclusive) are missing for now.

        Return whether there are any.
        """

    def count(self, name: str, events: int) -> None:
        """Add to a counter."""


class GapLedger:
    """The open gaps of one peer. Lives on the loop."""

    def __init__(self, origin: int, reporter: GapReporter, runtime: Runtime) -> None:
        self._origin, self._reporter, self._monotonic = origin, reporter, runtime.monotonic
        self._newest: dict[str, tuple[float, Newest]] = {}  # what beacons named, and when
        self._reported: dict[str, Newest] = {}  # per key, the event up to which its gaps were reported
        self._open = 0

    def note_newest(self, newest: Mapping[str, Newest]) -> None:
        """Keep the newest event of each key that a beacon named, if this node wanted the keys when it was sent."""
        now = self._monotonic()
        for key, each in newest.items():
            if key in self._newest or len(self._newest) < KEYS_MAX:
                self._newest[key] = now, each

    def succeed(self, other: GapLedger) -> None:
        """Take over the events that beacons named in an earlier incarnation of the peer, and the reports about them."""
        self._newest, self._reported = dict(other._newest), dict(other._reported)

    def missing_tails(
        self, reached: Callable[[str], int], quiet_s: float
    ) -> tuple[dict[str, Newest], dict[str, Newest]]:
        """Return the named events that did not arrive: those that may still be in flight, and those that are missing.

        An event may be in flight for `quiet_s` after it was named. `reached(key)` is the offset up to which the events
        of a key arrived.
        """
        interest, before = self._reporter.interest, self._monotonic() - quiet_s
        fresh: dict[str, Newest] = {}
        missing: dict[str, Newest] = {}
        for key, (at, newest) in self._newest.items():
            if newest[0] > reached(key) and interest.of(key).since != NEVER:
                (missing if at <= before else fresh)[key] = newest
        return fresh, missing

    def report(self, buffered: Iterable[Envelope], tails: Mapping[str, Newest], reached: Callable[[str], int]) -> None:
        """Report each gap before the buffered events, which are in order, and at the end of their keys, once."""
        last: dict[str, int] = {}
        sequences: dict[int, int] = {}
        for envelope in buffered:
            key, publisher_id = envelope.key, envelope.publisher_id
            before = max(reached(key), last.get(key, 0))
            if envelope.offset <= before:
                continue
            if envelope.previous > max(before, self._reported.get(key, (0, 0, 0))[0]):
                newest = (envelope.offset, publisher_id, envelope.sequence)
                self._report(key, sequences.get(publisher_id, -1), newest, envelope.sequence)
            last[key], sequences[publisher_id] = envelope.offset, envelope.sequence
        for key, newest in tails.items():
            if newest[0] > max(last.get(key, 0), self._reported.get(key, (0, 0, 0))[0]):
                self._report(key, sequences.get(newest[1], -1), newest, newest[2] + 1)

    def report_corrupt(self, after: int, until: int, events: int) -> None:
        """Report events that are corrupt in the log of the peer, which leaves them out."""
        self._reporter.count("gaps", 1)
        self._reporter.count("gaps_unrepaired", 1)
        reason = "events are corrupt in the log of the publisher"
        span: dict[str, Any] = {"after": after, "until": until, "events": events}
        record_reason(EVENT_GAP, logging.WARNING, code="gap_corrupt", reason=reason, origin=self._origin, **span)

    def _report(self, key: str, after: int, newest: Newest, before: int) -> None:
        _, publisher_id, _ = newest
        reported = self._reported.get(key)
        if reported is not None and reported[1] == publisher_id:
            after = max(after, reported[2])
        self._reported[key] = newest
        if self._reporter.report_open_gap(self._origin, key, publisher_id, after, before):
            self._open += 1

    def close(self) -> None:
        """Forget everything: the gaps were repaired, or reported as permanent."""
        self._reporter.count("gaps_open", -self._open)
        self._open = 0
        self._newest.clear()
        self._reported.clear()


class TrimmedRanges:
    """Events that retention removed from a peer's log before they were received.

    The next event of each publisher shows what is missing, so the gap is reported then.
    """

    def __init__(self, origin: int, low_water: int, reporter: GapReporter, runtime: Runtime) -> None:
        self._origin, self._low_water, self._reporter = origin, low_water, reporter
        self._at_ns = runtime.time_ns()
        self._reported: set[int] = set()
        self._counted = False

    def report_range(self, after: int) -> None:
        """Report the removed range as a gap: no event shows yet whose events are missing."""
        self._counted = True
        self._reporter.count("gaps", 1)
        self._reporter.count("gaps_unrepaired", 1)
        reason = "retention removed it at the publisher"
        span: dict[str, Any] = {"after": after, "until": self._low_water}
        record_reason(EVENT_GAP, logging.WARNING, code="gap_trimmed", reason=reason, origin=self._origin, **span)

    def report(self, envelopes: Sequence[Envelope]) -> bool:
        """Report the gap of each publisher, before its first later event is delivered. Return whether there was one."""
        found = False
        for envelope in envelopes:
            publisher_id = envelope.publisher_id
            if (
                publisher_id in self._reported
                or envelope.previous > self._low_water
                or len(self._reported) >= PUBLISHERS_MAX
            ):
                continue
            self._reported.add(publisher_id)
            if self._reporter.interest.of(envelope.key).since > self._at_ns:
                continue  # this node was not interested at that time
            if self._reporter.report_gap(self._origin, envelope.key, publisher_id, envelope.sequence, self._counted):
                found, self._counted = True, False
        return found
