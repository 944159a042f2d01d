"""Ranges that include their first and last offset, and positions, after which the log reads.

The options of the data source (`startOffset`, `endOffset`) and the files of the cold tier name the first and the last
event of a range. The log port reads after a position, and only the log computes with offsets. This module is the one
exception: a tier consists of ranges of the SQLite log, whose offsets are dense, so a range that ends at one offset is
continued at the next.
"""

from __future__ import annotations


def before(first: int) -> int:
    """Return the position to read after, so that a range begins at `first`. 0 is before every event.

    >>> before(7), before(1), before(0)
    (6, 0, 0)
    """
    return max(0, first - 1)


def following(last: int) -> int:
    """Return the first offset of the range that follows a position or the end of another range.

    >>> following(6), before(following(6))
    (7, 6)
    """
    return last + 1


def length(first: int, last: int) -> int:
    """Return how many offsets a range has.

    >>> length(1, 4)
    4
    """
    return following(last) - first
