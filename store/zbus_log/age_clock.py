"""The time by which age retention removes events: the clock of the machine, as far as it can be believed.

A clock that jumps a year ahead would make every event old enough to be removed. So a step of the clock
moves retention only gradually: compared with a monotonic clock, its time advances at most at twice the
usual speed until it has caught up, and never goes back. When a log is opened, its newest events show
which time it was: retention begins at most half of the retention age (at least a minute) after them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TOLERANCE_NS = 60 * 1_000_000_000  # corrections up to this size are normal
CATCH_UP = 2


def monotonic_ns() -> int:
    """Return the time of a clock that never jumps and, where the system has one, continues while it sleeps."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class AgeClock:
    """Not thread-safe. `report(clock_ns, used_ns)` is called when the machine's clock is first not believed."""

    def __init__(
        self,
        newest_ns: int | None,
        age_s: float,
        report: Callable[[int, int], None],
        *,
        wall_ns: Callable[[], int] = lambda: time.time_ns(),
        steady_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._wall_ns, self._steady_ns, self._report = wall_ns, steady_ns, report
        self._steady, self._reported = steady_ns(), False
        self._now = wall_ns()
        if newest_ns is not None:
            latest = newest_ns + max(TOLERANCE_NS, int(age_s * 1e9) // 2)
            self._now = min(self._now, latest) if self._now > newest_ns - TOLERANCE_NS else newest_ns

    def now_ns(self) -> int:
        """Return the current time."""
        steady, wall = self._steady_ns(), self._wall_ns()
        elapsed, self._steady = max(0, steady - self._steady), steady
        expected = self._now + elapsed
        if abs(wall - expected) <= TOLERANCE_NS:
            self._now, self._reported = max(self._now, wall), False
            return self._now
        self._now = min(wall, self._now + CATCH_UP * elapsed) if wall > expected else expected
        if not self._reported:
            self._reported = True
            self._report(wall, self._now)
        return self._now
