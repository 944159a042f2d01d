"""Which of two copies to take while a new subscription takes over from an old one.

As long as the old one gets every message its copies are taken; then, at the turn, those of the new one. A
message whose two copies lie on both sides of the turn would be taken twice or not at all: such copies
are known by their content, counted from shortly before the turn.
"""

from __future__ import annotations

import enum

OPEN_MAX = 100_000


class Phase(enum.Enum):
    """How far the server is."""

    BEGIN = enum.auto()  # the old ones get every message, the new ones some
    BOTH = enum.auto()  # both get every message
    BOTH_STILL = enum.auto()  # and have done so for a while
    END = enum.auto()  # the new ones get every message, the old ones some
    DONE = enum.auto()


class Turn:
    """One at a time; used by the connection's thread."""

    def __init__(self) -> None:
        self._phase = Phase.DONE
        self._open: dict[int, int] = {}  # of messages with one copy so far: how many more of the old than of the new
        self._halves: set[int] = set()  # those whose other copy may have come before anybody counted

    def enter(self, phase: Phase) -> None:
        """The server is so far."""
        self._phase = phase
        if phase is Phase.BOTH_STILL:
            self._halves = set(self._open)
        elif phase is Phase.END:
            for copy in self._halves:
                self._open.pop(copy, None)
        elif phase in (Phase.BEGIN, Phase.DONE):
            self._open, self._halves = {}, set()

    def takes(self, old: bool, subject: bytes, data: bytes, headers: bytes | None) -> bool:
        """Whether this copy, of an old or a new subscription, is the one to take."""
        if self._phase is Phase.BEGIN:
            return old
        copy = hash((subject, data, headers))
        balance = self._open.pop(copy, 0)
        if self._phase is Phase.END:
            # The new copies are taken, but for those whose old one was taken before; and an old one in that case
            # alone that its new one was passed over before.
            counted = balance < 0 if old else balance > 0
            self._keep(copy, balance + (1 if old else -1) if counted else balance)
            return counted is old
        balance += 1 if old else -1
        if not balance:
            self._halves.discard(copy)
        self._keep(copy, balance)
        return old

    def _keep(self, copy: int, balance: int) -> None:
        if balance and len(self._open) < OPEN_MAX:
            self._open[copy] = balance
