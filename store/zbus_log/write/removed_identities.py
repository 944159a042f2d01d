"""The identities of events that retention or a purge removed, kept for `dedup_s` seconds as ranges of sequences.

A retry may come after its event was removed, and must not be stored again. The sequences of a publisher are
consecutive, so its removed events are usually one range, and so one row. If only some of its keys are removed, there
are as many rows as gaps, until the events between them are removed too: ranges that touch are joined. Nothing is
dropped before its time, and a sequence that was never stored is in no range.

There can be millions of rows. A lookup is one search in the table for each sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping

from sqlalchemy import Connection

FOREVER_S = 100 * 365 * 86_400  # so that times fit into 63 bits
UP_TO = "offset <= ?1"  # for `remember`
LISTED = "offset IN (SELECT value FROM json_each(?1))"
EXAMINED_MAX = 65_536  # rows by one call of `forget_expired`, so that commits do not wait for it

# The ranges to remember, joined to the stored ones that they touch or overlap.
_JOINED = """
WITH removed AS (
    SELECT publisher, sequence, sequence - row_number() OVER (PARTITION BY publisher ORDER BY sequence) AS island
    FROM events WHERE {which}
), added AS (
    SELECT publisher, min(sequence) AS first, max(sequence) AS last FROM removed GROUP BY publisher, island
), touching AS (
    SELECT publisher, first, last, ?2 AS forget_at FROM added
    UNION
    SELECT stored.publisher, first_sequence, last_sequence, stored.forget_at
    FROM added CROSS JOIN removed_identities AS stored ON stored.publisher = added.publisher
    AND first_sequence <= last + 1 AND last_sequence >= first - 1 AND first_sequence >= ifnull((
        SELECT before.first_sequence FROM removed_identities AS before
        WHERE before.publisher = added.publisher AND before.first_sequence < first
        ORDER BY before.first_sequence DESC LIMIT 1
    ), first)
), marked AS (
    SELECT *, ifnull(first > 1 + max(last) OVER (
        PARTITION BY publisher ORDER BY first, last ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ), 1) AS is_first FROM touching
), islands AS (
    SELECT *, sum(is_first) OVER (PARTITION BY publisher ORDER BY first, last ROWS UNBOUNDED PRECEDING) AS island
    FROM marked
), joined AS (
    SELECT publisher, min(first) AS first, max(last) AS last, max(forget_at) AS forget_at
    FROM islands GROUP BY publisher, island
)
SELECT json_group_array(json_array(publisher, first, last, forget_at)) FROM joined
"""
_DELETE_JOINED = """
DELETE FROM removed_identities WHERE (publisher, first_sequence) IN (
    SELECT publisher, first_sequence FROM json_each(?1) CROSS JOIN removed_identities
    ON publisher = value ->> 0 AND first_sequence BETWEEN value ->> 1 AND value ->> 2
)
"""
_INSERT = "INSERT INTO removed_identities SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3 FROM json_each(?1)"
# Ranges do not overlap, so the last one that begins at a sequence or before it decides.
_FIND = """
SELECT value FROM json_each(?2) WHERE value <= (
    SELECT last_sequence FROM removed_identities
    WHERE publisher = ?1 AND first_sequence <= value ORDER BY first_sequence DESC LIMIT 1
)
"""
_EXAMINED_UNTIL = """
SELECT publisher, first_sequence FROM removed_identities WHERE (publisher, first_sequence) > (?, ?)
ORDER BY publisher, first_sequence LIMIT 1 OFFSET ?
"""
_FORGET = """
DELETE FROM removed_identities
WHERE (publisher, first_sequence) > (?, ?) AND (publisher, first_sequence) <= (?, ?) AND forget_at <= ?
"""
_LOWEST, _HIGHEST = (-(1 << 63), -(1 << 63)), ((1 << 63) - 1, (1 << 63) - 1)


class RemovedIdentities:
    """Used by the writer's thread only. They are kept for `dedup_s` seconds, by the time of retention."""

    def __init__(self, connection: Connection, dedup_s: float, now_ns: Callable[[], int]) -> None:
        self._connection, self._dedup_ns, self._now_ns = connection, int(min(dedup_s, FOREVER_S) * 1e9), now_ns
        self._examined = _LOWEST

    def remember(self, which: str, value: int | str) -> None:
        """Remember the identities of events that are about to be removed in this transaction.

        `which` is `UP_TO` with an offset, or `LISTED` with a JSON array of offsets.
        """
        if not self._dedup_ns:
            return
        connection, forget_at = self._connection, self._now_ns() + self._dedup_ns
        joined = connection.exec_driver_sql(_JOINED.format(which=which), (value, forget_at)).scalar_one()
        connection.exec_driver_sql(_DELETE_JOINED, (joined,))
        connection.exec_driver_sql(_INSERT, (joined,))

    def forget_expired(self) -> None:
        """Delete some identities whose time is over. The next call continues where this one ended."""
        row = self._connection.exec_driver_sql(_EXAMINED_UNTIL, (*self._examined, EXAMINED_MAX - 1)).first()
        until = _HIGHEST if row is None else (row[0], row[1])
        self._connection.exec_driver_sql(_FORGET, (*self._examined, *until, self._now_ns()))
        self._examined = _LOWEST if row is None else until


def find(connection: Connection, wanted: Mapping[int, Collection[int]]) -> set[tuple[int, int]]:
    """Return those of the wanted sequences, by publisher, that were stored and removed."""
    found: set[tuple[int, int]] = set()
    for publisher, sequences in wanted.items():
        removed = connection.exec_driver_sql(_FIND, (publisher, json.dumps(list(sequences)))).scalars()
        found.update((publisher, sequence) for sequence in removed)
    return found


def identities_by_publisher(connection: Connection) -> dict[int, list[tuple[int, int]]]:
    """Return the sequences of each publisher that were removed, as ascending ranges, in a file of this version."""
    found: dict[int, list[tuple[int, int]]] = {}
    for publisher, first, last in connection.exec_driver_sql(
        "SELECT publisher, first_sequence, last_sequence FROM removed_identities ORDER BY publisher, first_sequence"
    ):
        ranges = found.setdefault(int(publisher), [])
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], int(last))
        else:
            ranges.append((int(first), int(last)))
    return found
