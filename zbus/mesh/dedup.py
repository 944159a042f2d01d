"""Which events were seen, by identity, in bounded memory.

Sequences of a publisher rise, so the highest one seen tells the new from the old. What was skipped on
the way (another path may still bring it) is kept in a window that forgets by age and by number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zbus.util.memo import Memo

if TYPE_CHECKING:
    from moka_py import Moka

PUBLISHERS_MAX = 100_000
SKIPPED_MAX = 100_000
SKIPPED_AT_ONCE_MAX = 4096
WINDOW_S = 120.0


class Seen:
    """Lives on one thread. `first_time` is the whole of it.

    >>> seen = Seen()
    >>> seen.first_time(7, 0), seen.first_time(7, 0), seen.first_time(7, 2), seen.first_time(7, 1)
    (True, False, True, True)
    """

    def __init__(self) -> None:
        self._last = Memo[int, list[int]](PUBLISHERS_MAX, lambda _: [])  # the highest sequence, if any
        self._skipped: Moka[tuple[int, int], bool] | None = None

    def last(self, publisher_id: int) -> int | None:
        """The highest sequence seen of a publisher."""
        last = self._last.get(publisher_id)
        return last[0] if last else None

    def first_time(self, publisher_id: int, sequence: int) -> bool:
        """Whether this identity was not seen before; from now on it was."""
        mark = self._last[publisher_id]
        if not mark:
            mark.append(sequence)
            return True
        last = mark[0]
        if sequence <= last:
            return self._skipped is not None and self._skipped.remove((publisher_id, sequence)) is not None
        if sequence > last + 1:
            window = self._skipped = self._skipped or _window()
            for skipped in range(max(last + 1, sequence - SKIPPED_AT_ONCE_MAX), sequence):
                window.set((publisher_id, skipped), True)
        mark[0] = sequence
        return True


def _window() -> Moka[tuple[int, int], bool]:
    from moka_py import Moka  # most nodes never miss anything

    return Moka(SKIPPED_MAX, ttl=WINDOW_S)
