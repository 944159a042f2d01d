"""The identities of events that retention removed, kept for a while as ranges of sequences.

A retry may come after retention has removed the event, and must not be stored again. The sequences of a publisher are
consecutive, so its removed events are usually one range, and so one row. For a publisher with many gaps, the newest
`RANGES_MAX` ranges are kept. Older ones are forgotten: no event that was never stored is taken for a removed one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from sqlalchemy import Connection

RANGES_MAX = 4096  # for each publisher
FOREVER_S = 100 * 365 * 86_400  # so that times fit into 63 bits
UP_TO = "offset <= ?1"  # for `remember`
LISTED = "offset IN (SELECT value FROM json_each(?1))"

_REMEMBER = """
WITH removed AS (
    SELECT publisher, sequence, sequence - row_number() OVER (PARTITION BY publisher ORDER BY sequence) AS island
    FROM events WHERE {which}
), ranges AS (
    SELECT publisher, min(sequence) AS first, max(sequence) AS last FROM removed GROUP BY publisher, island
)
INSERT INTO removed_identities (publisher, first_sequence, last_sequence, forget_at)
SELECT ranges.publisher, ifnull(before.first_sequence, first), last, ?2
FROM ranges LEFT JOIN removed_identities AS before
    ON before.publisher = ranges.publisher AND before.last_sequence = first - 1
WHERE true
ON CONFLICT (publisher, first_sequence) DO UPDATE SET
    last_sequence = max(last_sequence, excluded.last_sequence), forget_at = max(forget_at, excluded.forget_at)
"""
_FRAGMENTED = """
SELECT publisher FROM removed_identities WHERE publisher IN (SELECT publisher FROM events WHERE {which})
GROUP BY publisher HAVING count(*) > ?2
"""
_OLDER = "publisher = ?1 AND first_sequence < (SELECT first_sequence FROM removed_identities WHERE publisher = ?1 "
_OLDER += "ORDER BY first_sequence DESC LIMIT 1 OFFSET ?2)"


class RemovedIdentities:
    """Used by the writer's thread only. They are kept for `dedup_s` seconds, by the time of retention."""

    def __init__(self, connection: Connection, dedup_s: float, now_ns: Callable[[], int]) -> None:
        self._connection, self._dedup_ns, self._now_ns = connection, int(min(dedup_s, FOREVER_S) * 1e9), now_ns

    def remember(self, which: str, value: int | str) -> None:
        """Remember the identities of events that are about to be removed in this transaction.

        `which` is `UP_TO` with an offset, or `LISTED` with a JSON array of offsets.
        """
        if not self._dedup_ns:
            return
        connection = self._connection
        connection.exec_driver_sql(_REMEMBER.format(which=which), (value, self._now_ns() + self._dedup_ns))
        fragmented = connection.exec_driver_sql(_FRAGMENTED.format(which=which), (value, RANGES_MAX))
        for publisher in fragmented.scalars().all():
            connection.exec_driver_sql(f"DELETE FROM removed_identities WHERE {_OLDER}", (publisher, RANGES_MAX - 1))

    def forget_expired(self) -> None:
        """Delete the identities whose time is over."""
        self._connection.exec_driver_sql("DELETE FROM removed_identities WHERE forget_at <= ?", (self._now_ns(),))


def find(connection: Connection, wanted: Mapping[int, Collection[int]]) -> set[tuple[int, int]]:
    """Return those of the wanted sequences, by publisher, that were stored and removed."""
    found: set[tuple[int, int]] = set()
    for publisher, sequences in wanted.items():
        ranges = connection.exec_driver_sql(
            "SELECT first_sequence, last_sequence FROM removed_identities"
            " WHERE publisher = ? AND first_sequence <= ? AND last_sequence >= ?",
            (publisher, max(sequences), min(sequences)),
        ).all()
        for first, last in ranges:
            found.update((publisher, sequence) for sequence in sequences if first <= sequence <= last)
    return found
