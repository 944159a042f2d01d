"""The incarnations of each log that were seen, and the signs that two copies of one log are in use.

A restarted log continues in a new incarnation, and its events before that belong to both. Two copies of a log differ:
one of them continues after the other one has begun; or, if they share an incarnation because a running machine was
copied, they have different digests at the same offset.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from zbus.ports.lineage import Branch
from zbus.util.memo import Memo

LOGS_MAX = 10_000
BRANCHES_MAX = 16  # of one log
DIGESTS_MAX = 64  # of one incarnation
ENDED_S = 10.0  # how long late events of an incarnation that has ended are expected
LATE_S = 2.0  # a beacon that is later than this after the next incarnation began is not a late one of a dead process


class _Seen:
    """One incarnation: when it was first seen, when its last beacon came, and the digests that its beacons named."""

    __slots__ = ("at", "beacon_at", "branch", "digests", "is_proven")

    def __init__(self, branch: Branch, at: float) -> None:
        self.branch, self.at, self.beacon_at = branch, at, -math.inf
        self.is_proven = False  # its log has replied
        self.digests = Memo[int, bytes](DIGESTS_MAX)


class Incarnations:
    """The incarnations of all logs. Lives on the loop. `report(origin, one, other)` is called once for two copies.

    >>> found = []
    >>> logs = Incarnations(lambda: 0.0, lambda *copies: found.append(copies))
    >>> logs.add(5, Branch(7, 1, 7)), logs.add(5, Branch(9, 101, 7)), logs.add(5, Branch(9, 101, 7))
    (True, True, False)
    >>> logs.prove(5, 9), logs.prove(5, 9)
    (True, False)
    >>> logs.current(5, Branch(7, 1, 7), 100).id, logs.current(5, Branch(7, 1, 7), 101).id
    (9, 7)
    """

    def __init__(self, monotonic: Callable[[], float], report: Callable[[int, int, int], None]) -> None:
        self._monotonic, self._report = monotonic, report
        self._logs = Memo[int, Memo[int, _Seen]](LOGS_MAX, lambda _: Memo[int, _Seen](BRANCHES_MAX))
        self._reported = Memo[int, dict[tuple[int, int], None]](LOGS_MAX)  # pairs of copies, by log

    def add(self, origin: int, branch: Branch) -> bool:
        """Add an incarnation. Returns whether it is new."""
        seen = self._logs[origin]
        if branch.id in seen:
            return False
        seen[branch.id] = _Seen(branch, self._monotonic())
        return True

    def prove(self, origin: int, incarnation: int) -> bool:
        """Note that the log of an incarnation has replied, so that it exists. Returns whether that is new."""
        seen = self._logs[origin].get(incarnation)
        if seen is None or seen.is_proven:
            return False
        seen.is_proven = True
        return True

    def current(self, origin: int, branch: Branch, offset: int) -> Branch:
        """Return the newest incarnation that has the events of this one up to `offset`, and exists.

        If this one still sends a while after the other has begun, it has not ended.
        """
        found, since = branch, self._monotonic() - ENDED_S
        for each in self._logs[origin].values():  # in the order in which they were seen
            continues = each.branch.parent == found.id != each.branch.id
            if continues and each.is_proven and offset < each.branch.first and each.at > since:
                found = each.branch
        return found

    def check(self, origin: int, branch: Branch, head: int, digest: bytes) -> None:
        """Compare a beacon with those of the same log. Reports two copies."""
        seen = self._logs[origin]
        this = seen.get(branch.id)
        if this is None:
            return
        if digest:
            if this.digests.get(head, digest) != digest:
                self._found(origin, branch.id, branch.id)
            this.digests[head] = digest
        this.beacon_at = now = self._monotonic()
        for other in seen.values():
            if other is this or not (this.is_proven and other.is_proven):
                continue
            if branch.parent == other.branch.id or now - other.at < LATE_S:
                continue  # this one continues the other, or the beacon may be a late one of a process that has ended
            if other.branch.parent == branch.id:
                in_use = head >= other.branch.first
            else:
                in_use = other.beacon_at - this.at >= LATE_S
            if in_use:
                self._found(origin, branch.id, other.branch.id)

    def branch(self, origin: int, incarnation: int) -> Branch | None:
        """Return an incarnation that was seen."""
        seen = self._logs[origin].get(incarnation)
        return seen.branch if seen is not None else None

    def copies_of(self, origin: int, incarnation: int) -> tuple[int, ...]:
        """Return the incarnations that were reported as copies of this one."""
        pairs = [pair for pair in self._reported.get(origin, ()) if incarnation in pair]
        return tuple({each: None for pair in pairs for each in pair if each != incarnation})

    def _found(self, origin: int, one: int, other: int) -> None:
        reported = self._reported.setdefault(origin, {})
        pair = (min(one, other), max(one, other))
        if pair not in reported and len(reported) < BRANCHES_MAX:
            reported[pair] = None
            self._report(origin, one, other)
