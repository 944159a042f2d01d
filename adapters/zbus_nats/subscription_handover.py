"""Which of two copies to take while a new subscription takes over from an old one.

As long as the old one gets every message its copies are taken; then, at the turn, those of the new one. A
message whose two copies lie on both sides of the turn would be taken twice or not at all: such copies
are known by their content, counted from shortly before the turn.
"""

from __future__ import annotations

import enum

OPEN_MAX = 100_000


class HandoverPhase(enum.Enum):
    """How far the server is."""

    BOTH_BEGIN = enum.auto()  # the old ones get every message, the new ones some
    BOTH = enum.auto()  # both get every message
    BOTH_STILL = enum.auto()  # and have done so for a while
    BOTH_END = enum.auto()  # the new ones get every message, the old ones some
    DONE = enum.auto()


class SubscriptionHandover:
    """One at a time; used by the connection's thread."""

    def __init__(self) -> None:
        self._phase = HandoverPhase.DONE
        self._open: dict[int, int] = {}  # of messages with one copy so far: how many more of the old than of the new
        self._halves: set[int] = set()  # those whose other copy may have come before anybody counted
        self._taken: dict[int, int] = {}  # after the turn: how many more were taken as old copies than as new

    def enter(self, phase: HandoverPhase) -> None:
        """The server is so far."""
        self._phase = phase
        if phase is HandoverPhase.BOTH_STILL:
            self._halves = set(self._open)
        elif phase is HandoverPhase.BOTH_END:
            for copy in self._halves:
                self._open.pop(copy, None)
        elif phase in (HandoverPhase.BOTH_BEGIN, HandoverPhase.DONE):
            self._open, self._halves, self._taken = {}, set(), {}

    def takes(self, old: bool, subject: bytes, data: bytes, headers: bytes | None) -> bool:
        """Whether this copy, of an old or a new subscription, is the one to take."""
        if self._phase is HandoverPhase.BOTH_BEGIN:
            return old
        copy = hash((subject, data, headers))
        balance = self._open.pop(copy, 0)
        if self._phase is HandoverPhase.BOTH_END:
            return self._takes_after(old, copy, balance)
        balance += 1 if old else -1
        if not balance:
            self._halves.discard(copy)
        _keep(self._open, copy, balance)
        return old

    def _takes_after(self, old: bool, copy: int, balance: int) -> bool:
        step = 1 if old else -1
        if balance * step < 0:  # the other copy came before the turn, and was taken if it was the old one
            _keep(self._open, copy, balance + step)
            return old
        _keep(self._open, copy, balance)
        taken = self._taken.pop(copy, 0)
        _keep(self._taken, copy, taken + step)
        return taken * step >= 0  # the first copy to come


def _keep(balances: dict[int, int], copy: int, balance: int) -> None:
    if balance and len(balances) < OPEN_MAX:
        balances[copy] = balance
