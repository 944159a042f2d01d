"""Holes in what came of one node that its log cannot fill now, and that retention there made for good.

A node may be away for long, or never come back, after something of it was lost on the way. What our log
records waits for it, since a durable name relies on that: each such hole is told once, and counted as open
until it is filled. Of a lost end nothing but a beacon tells, so what beacons name meanwhile is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from zbus.util.runtime import Runtime
from zbus.wire.beacon import Newest
from zbus.wire.envelope import Envelope

from .interest import NEVER, Interest

KEYS_MAX = PUBLISHERS_MAX = 10_000


class GapReporter(Protocol):
    """What tells of holes."""

    interest: Interest

    def report_gap(self, origin: int, key: str, publisher_id: int, sequence: int, counted: bool = False) -> bool:
        """What was not seen of a publisher before this sequence is missing for good; whether that is anything.

        `counted`: the counters have it already.
        """

    def report_open_gap(self, origin: int, key: str, publisher_id: int, after: int, sequence: int) -> bool:
        """What was not seen of a publisher over `after` and before `sequence` cannot be had now; whether it is any."""

    def count(self, name: str, events: int) -> None:
        """Add to a counter."""


class GapLedger:
    """Lives on the loop, like the origin whose holes these are."""

    def __init__(self, origin: int, reporter: GapReporter, runtime: Runtime) -> None:
        self._origin, self._reporter, self._monotonic = origin, reporter, runtime.monotonic
        self._newest: dict[str, tuple[float, Newest]] = {}  # by beacons, and when
        self._reported: dict[str, Newest] = {}  # up to which event of a key its holes were told
        self._open = 0

    def note_newest(self, newest: Mapping[str, Newest]) -> None:
        """A beacon named the newest event of some keys, and it is sure that they were wanted then."""
        now = self._monotonic()
        for key, each in newest.items():
            if key in self._newest or len(self._newest) < KEYS_MAX:
                self._newest[key] = now, each

    def missing_tails(
        self, reached: Callable[[str], int], quiet_s: float
    ) -> tuple[dict[str, Newest], dict[str, Newest]]:
        """Named events of which nothing came: those that may still be under way for `quiet_s`, and those that may not.

        `reached`: up to which offset a key came.
        """
        interest, before = self._reporter.interest, self._monotonic() - quiet_s
        fresh: dict[str, Newest] = {}
        missing: dict[str, Newest] = {}
        for key, (at, newest) in self._newest.items():
            if newest[0] > reached(key) and interest.of(key).since != NEVER:
                (missing if at <= before else fresh)[key] = newest
        return fresh, missing

    def report(self, buffered: Iterable[Envelope], tails: Mapping[str, Newest], reached: Callable[[str], int]) -> None:
        """Tell each hole between events that are held, in order, and at the end of their keys: once."""
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

    def _report(self, key: str, after: int, newest: Newest, before: int) -> None:
        _, publisher_id, _ = newest
        reported = self._reported.get(key)
        if reported is not None and reported[1] == publisher_id:
            after = max(after, reported[2])
        self._reported[key] = newest
        if self._reporter.report_open_gap(self._origin, key, publisher_id, after, before):
            self._open += 1

    def close(self) -> None:
        """They are filled, or told as gaps."""
        self._reporter.count("gaps_open", -self._open)
        self._open = 0
        self._newest.clear()
        self._reported.clear()


class TrimmedRanges:
    """What retention removed at a node before we had it: told at the next event of each of its publishers."""

    def __init__(self, origin: int, low_water: int, reporter: GapReporter, runtime: Runtime) -> None:
        self._origin, self._low_water, self._reporter = origin, low_water, reporter
        self._at_ns = runtime.time_ns()
        self._reported: set[int] = set()
        self._counted = False

    def count(self) -> None:
        """Nothing is left by which it could be told now: the counters at least have it."""
        self._counted = True
        self._reporter.count("gaps", 1)
        self._reporter.count("gaps_unrepaired", 1)

    def report(self, envelopes: Sequence[Envelope]) -> bool:
        """Tell of each publisher, before its first event after what was removed is handed over; whether of any."""
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
                continue  # nobody wanted it then
            if self._reporter.report_gap(self._origin, envelope.key, publisher_id, envelope.sequence, self._counted):
                found, self._counted = True, False
        return found
