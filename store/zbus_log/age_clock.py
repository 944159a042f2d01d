"""The time by which age retention removes events: the clock of the machine, as far as it can be believed.

A clock that jumps a year ahead would make every event old enough to be removed. Removing too little is safe, and
removing too much is not. So the time of retention is never after the clock of the machine, and it follows a clock that
jumps ahead only gradually: compared with a monotonic clock, it advances at most at twice the usual speed until it has
caught up. A clock that has differed for as long as events are kept is believed: whatever was stored before it jumped
is that old by any clock.

The time is stored in the log, so that a restart does not make a wrong clock right. When a log is opened, the clock may
be ahead by half of the retention age (at least a minute), as after a pause, unless it differed before. A log that has
no stored time begins with that of its newest events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from sqlalchemy import Connection

TOLERANCE_NS = 60 * 1_000_000_000  # corrections up to this size are normal
CATCH_UP = 2
PART_OF_AGE = 16  # of the shortest age has passed when the time is stored again
PREFIX = "clock/"  # of the names in `examined`
_TIME, _SINCE = f"{PREFIX}time_ns", f"{PREFIX}differs_since_ns"


class ClockState(NamedTuple):
    """What is stored of the time of retention."""

    time_ns: int
    differs_since_ns: int | None = None  # what the machine's clock showed when it began to differ; None: it does not


def load_clock(connection: Connection) -> ClockState | None:
    """Return the stored time of retention, if there is one."""
    rows: dict[str, int] = dict(
        connection.exec_driver_sql("SELECT rule, until FROM examined WHERE rule IN (?, ?)", (_TIME, _SINCE)).all()
    )
    return ClockState(rows[_TIME], rows.get(_SINCE)) if _TIME in rows else None


def save_clock(connection: Connection, state: ClockState) -> None:
    """Store the time of retention. Call it in a transaction."""
    connection.exec_driver_sql("DELETE FROM examined WHERE rule IN (?, ?)", (_TIME, _SINCE))
    rows = [(_TIME, state.time_ns), (_SINCE, state.differs_since_ns)]
    connection.exec_driver_sql("INSERT INTO examined VALUES (?, ?)", [row for row in rows if row[1] is not None])


def monotonic_ns() -> int:
    """Return the time of a clock that never jumps and, where the system has one, continues while it sleeps."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class AgeClock:
    """Not thread-safe. `newest_ns` is when the newest events were published, `ages_s` is how long anything is kept."""

    def __init__(
        self,
        stored: ClockState | None,
        newest_ns: int | None,
        ages_s: Collection[float],
        *,
        wall_ns: Callable[[], int] = lambda: time.time_ns(),
        steady_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._wall_ns, self._steady_ns = wall_ns, steady_ns
        self._shortest_ns, self._longest_ns = int(min(ages_s) * 1e9), int(max(ages_s) * 1e9)
        self._reported = False
        self._wall, self._steady = wall_ns(), steady_ns()
        wall = self._wall
        known = stored or ClockState(wall if newest_ns is None else min(newest_ns, wall))
        self._now, self._since = known
        if self._since is None:
            pause = max(TOLERANCE_NS, self._shortest_ns // 2)
            self._now = max(self._now, min(wall, self._now + pause))
        else:
            self._since = min(self._since, wall)
        self.now_ns()

    def now_ns(self) -> int:
        """Return the current time."""
        before, self._wall = self._wall, self._wall_ns()
        steady = self._steady_ns()
        elapsed, self._steady = max(0, steady - self._steady), steady
        wall, expected = self._wall, self._now + elapsed
        if abs(wall - expected) <= TOLERANCE_NS:
            self._believe()
            return wall
        if self._since is None or abs(wall - before - elapsed) > TOLERANCE_NS:
            self._since, self._reported = wall, False
        if wall - self._since >= max(TOLERANCE_NS, self._longest_ns):
            self._believe()
        else:
            self._now = min(wall, self._now + CATCH_UP * elapsed) if wall > expected else expected
        return min(self._now, wall)

    def take_jump(self) -> int | None:
        """Return how far the machine's clock is ahead, in nanoseconds, once after it began to differ."""
        if self._since is None or self._reported:
            return None
        self._reported = True
        return self._wall - self._now

    @property
    def state(self) -> ClockState:
        """What to store."""
        return ClockState(self._now, self._since)

    def is_due(self, stored: ClockState | None) -> bool:
        """Return whether the state should be stored: not at each step, because an idle log should not write."""
        if stored is None or stored.differs_since_ns != self._since:
            return True
        return abs(self._now - stored.time_ns) >= max(TOLERANCE_NS, self._shortest_ns // PART_OF_AGE)

    def _believe(self) -> None:
        self._now, self._since, self._reported = self._wall, None, False
