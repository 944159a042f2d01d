"""The identities of events that retention removed, kept for a while as ranges of sequences.

A retry may come after retention has removed the event, and must not be stored again. The sequences of a publisher are
consecutive, so its removed events are usually one range, and so one row. For a publisher with many gaps, the newest
`RANGES_MAX` ranges are kept. Older ones are forgotten: no event that was never stored is taken for a removed one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from sqlalchemy import Connection

RANGES_MAX = 4096  # for each publisher
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


def remember(connection: Connection, which: str, value: int | str, dedup_s: float) -> None:
    """Remember the identities of events that are about to be removed in this transaction.

    `which` is `UP_TO` with an offset, or `LISTED` with a JSON array of offsets.
    """
    if not dedup_s:
        return
    forget_at = min(time.time_ns() + int(dedup_s * 1e9), (1 << 63) - 1)
    connection.exec_driver_sql(_REMEMBER.format(which=which), (value, forget_at))
    fragmented = connection.exec_driver_sql(_FRAGMENTED.format(which=which), (value, RANGES_MAX))
    for publisher in fragmented.scalars().all():
        connection.exec_driver_sql(f"DELETE FROM removed_identities WHERE {_OLDER}", (publisher, RANGES_MAX - 1))


def forget_expired(connection: Connection) -> None:
    """Delete the identities whose time is over."""
    connection.exec_driver_sql("DELETE FROM removed_identities WHERE forget_at <= ?", (time.time_ns(),))


def find(connection: Connection, wanted: Mapping[int, Collection[int]]) -> set[tuple[int, int]]:
    """Return those of the wanted sequences, by publisher, that were stored and removed."""
    found: set[tuple[int, int]] = set()
    for publisher, sequences in wanted.items():
        ranges = connection.exec_driver_sql(
            "SELECT first_sequence, last_sequence FROM removed_identities"
            " WHERE publisher = ? AND first_sequence <= ? AND last_sequence >= ? AND forget_at > ?",
            (publisher, max(sequences), min(sequences), time.time_ns()),
        ).all()
        for first, last in ranges:
            found.update((publisher, sequence) for sequence in sequences if first <= sequence <= last)
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
