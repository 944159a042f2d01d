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

    wants: Interest

    def gap(self, origin: int, key: str, publisher_id: int, sequence: int, counted: bool = False) -> bool:
        """What was not seen of a publisher before this sequence is missing for good; whether that is anything.

        `counted`: the counters have it already.
        """

    def overdue(self, origin: int, key: str, publisher_id: int, after: int, sequence: int) -> bool:
        """What was not seen of a publisher over `after` and before `sequence` cannot be had now; whether it is any."""

    def count(self, name: str, events: int) -> None:
        """Add to a counter."""


class GapLedger:
    """Lives on the loop, like the origin whose holes these are."""

    def __init__(self, origin: int, teller: GapReporter, runtime: Runtime) -> None:
        self._origin, self._teller, self._monotonic = origin, teller, runtime.monotonic
        self._named: dict[str, tuple[float, Newest]] = {}  # by beacons, and when
        self._told: dict[str, Newest] = {}  # up to which event of a key its holes were told
        self._open = 0

    def name(self, newest: Mapping[str, Newest]) -> None:
        """A beacon named the newest event of some keys, and it is sure that they were wanted then."""
        now = self._monotonic()
        for key, each in newest.items():
            if key in self._named or len(self._named) < KEYS_MAX:
                self._named[key] = now, each

    def ends(self, seen: Callable[[str], int], quiet_s: float) -> tuple[dict[str, Newest], dict[str, Newest]]:
        """Named events of which nothing came: those that may still be under way for `quiet_s`, and those that may not.

        `seen`: up to which offset a key came.
        """
        wants, before = self._teller.wants, self._monotonic() - quiet_s
        fresh: dict[str, Newest] = {}
        missing: dict[str, Newest] = {}
        for key, (at, newest) in self._named.items():
            if newest[0] > seen(key) and wants.of(key).since != NEVER:
                (missing if at <= before else fresh)[key] = newest
        return fresh, missing

    def report(self, held: Iterable[Envelope], ends: Mapping[str, Newest], seen: Callable[[str], int]) -> None:
        """Tell each hole between events that are held, in order, and at the end of their keys: once."""
        last: dict[str, int] = {}
        sequences: dict[int, int] = {}
        for envelope in held:
            key, publisher_id = envelope.key, envelope.publisher_id
            reached = max(seen(key), last.get(key, 0))
            if envelope.offset <= reached:
                continue
            if envelope.previous > max(reached, self._told.get(key, (0, 0, 0))[0]):
                newest = (envelope.offset, publisher_id, envelope.sequence)
                self._tell(key, sequences.get(publisher_id, -1), newest, envelope.sequence)
            last[key], sequences[publisher_id] = envelope.offset, envelope.sequence
        for key, newest in ends.items():
            if newest[0] > max(last.get(key, 0), self._told.get(key, (0, 0, 0))[0]):
                self._tell(key, sequences.get(newest[1], -1), newest, newest[2] + 1)

    def _tell(self, key: str, after: int, newest: Newest, before: int) -> None:
        _, publisher_id, _ = newest
        told = self._told.get(key)
        if told is not None and told[1] == publisher_id:
            after = max(after, told[2])
        self._told[key] = newest
        if self._teller.overdue(self._origin, key, publisher_id, after, before):
            self._open += 1

    def close(self) -> None:
        """They are filled, or told as gaps."""
        self._teller.count("gaps_open", -self._open)
        self._open = 0
        self._named.clear()
        self._told.clear()


class TrimmedRanges:
    """What retention removed at a node before we had it: told at the next event of each of its publishers."""

    def __init__(self, origin: int, low_water: int, teller: GapReporter, runtime: Runtime) -> None:
        self._origin, self._low_water, self._teller = origin, low_water, teller
        self._at_ns = runtime.time_ns()
        self._told: set[int] = set()
        self._counted = False

    def count(self) -> None:
        """Nothing is left by which it could be told now: the counters at least have it."""
        self._counted = True
        self._teller.count("gaps", 1)
        self._teller.count("gaps_unrepaired", 1)

    def tell(self, envelopes: Sequence[Envelope]) -> bool:
        """Tell of each publisher, before its first event after what was removed is handed over; whether of any."""
        found = False
        for envelope in envelopes:
            publisher_id = envelope.publisher_id
            if publisher_id in self._told or envelope.previous > self._low_water or len(self._told) >= PUBLISHERS_MAX:
                continue
            self._told.add(publisher_id)
            if self._teller.wants.of(envelope.key).since > self._at_ns:
                continue  # nobody wanted it then
            if self._teller.gap(self._origin, envelope.key, publisher_id, envelope.sequence, self._counted):
                found, self._counted = True, False
        return found
