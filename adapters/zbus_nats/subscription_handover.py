"""The handover from old subscriptions to new ones: decides which of two copies of a message to use.

While the old subscriptions get every message, their copies are used. After the switch, those of the new ones are. A
message whose copies arrive before and after the switch would be used twice or never. Such copies are recognized by
their content, which is counted from shortly before the switch.
"""

from __future__ import annotations

import enum

OPEN_MAX = 100_000


class HandoverPhase(enum.Enum):
    """The state of the server during a handover."""

    BOTH_BEGIN = enum.auto()  # the old ones get every message, the new ones some
    BOTH = enum.auto()  # both get every message
    BOTH_STILL = enum.auto()  # and have done so for a while
    BOTH_END = enum.auto()  # the new ones get every message, the old ones some
    DONE = enum.auto()


class SubscriptionHandover:
    """One handover at a time. Only for the connection's thread."""

    def __init__(self) -> None:
        self._phase = HandoverPhase.DONE
        self._open: dict[int, int] = {}  # messages with one copy so far: how many more old copies than new ones
        self._halves: set[int] = set()  # messages whose other copy may have arrived before counting began
        self._taken: dict[int, int] = {}  # after the switch: how many more old copies were used than new ones

    def enter(self, phase: HandoverPhase) -> None:
        """Enter a phase, because the server has reached it."""
        self._phase = phase
        if phase is HandoverPhase.BOTH_STILL:
            self._halves = set(self._open)
        elif phase is HandoverPhase.BOTH_END:
            for copy in self._halves:
                self._open.pop(copy, None)
        elif phase in (HandoverPhase.BOTH_BEGIN, HandoverPhase.DONE):
            self._open, self._halves, self._taken = {}, set(), {}

    def takes(self, old: bool, subject: bytes, data: bytes, headers: bytes | None) -> bool:
        """Return whether to use this copy, which came from an old or a new subscription."""
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
        if balance * step < 0:  # the other copy came before the switch, and was used if it was the old one
            _keep(self._open, copy, balance + step)
            return old
        _keep(self._open, copy, balance)
        taken = self._taken.pop(copy, 0)
        _keep(self._taken, copy, taken + step)
        return taken * step >= 0  # the first copy is used


def _keep(balances: dict[int, int], copy: int, balance: int) -> None:
    if balance and len(balances) < OPEN_MAX:
        balances[copy] = balance
