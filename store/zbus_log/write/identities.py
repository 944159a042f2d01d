"""Deduplication by identity (publisher, sequence): each is stored once, however often it is retried.

An index over all identities would dirty a page per publisher at each commit. But sequences increase, so the
highest sequence of each publisher, kept in memory, shows that an event is new. Only events with a lower
sequence are looked up in the log, and only in blocks whose runs span that sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from zbus.ports.log import Row
from zbus_log.file.tables import BLOCK

PUBLISHERS_KEPT_MAX = 100_000


class StoredIdentities:
    """Belongs to the writer and uses its connection, on its thread."""

    def __init__(self, connection: Connection, sealed_until: int) -> None:
        self._connection = connection
        self.sealed_until = sealed_until
        self._last_sequences: dict[int, int] = {}
        self.forget()

    def fresh(self, batch: Sequence[Row], following: int) -> tuple[Sequence[Row], Sequence[int]]:
        """Return the rows that are not stored yet, and the offset of every row, including the new ones.

        Usually one comparison per row shows that all are new. Only otherwise is the log read.
        """
        last_sequences = self._last_sequences
        publishers = {row.publisher_id for row in batch}
        if not publishers <= last_sequences.keys():
            self._learn(publishers)
        for row in batch:
            publisher_id, sequence = row.publisher_id, row.sequence
            if sequence <= last_sequences[publisher_id]:
                break
            last_sequences[publisher_id] = sequence
        else:
            return batch, range(following, following + len(batch))
        self.forget()  # the loop above included rows that are not stored yet
        self._learn(publishers)
        fresh, offsets = self._one_by_one(batch, following)
        return (batch, offsets) if len(fresh) == len(batch) else (fresh, offsets)

    def _one_by_one(self, batch: Sequence[Row], following: int) -> tuple[Sequence[Row], Sequence[int]]:
        fresh: list[Row] = []
        offsets: list[int] = []
        wanted: dict[int, set[int]] = {}
        for row in batch:
            if row.sequence <= self._last_sequences[row.publisher_id]:
                wanted.setdefault(row.publisher_id, set()).add(row.sequence)
        known = self._stored_at(wanted)
        for row in batch:
            identity = row.publisher_id, row.sequence
            stored = known.get(identity)
            if stored is None:
                stored = known[identity] = following + len(fresh)
                fresh.append(row)
                self._last_sequences[row.publisher_id] = max(row.sequence, self._last_sequences[row.publisher_id])
            offsets.append(stored)
        return fresh, offsets

    def _learn(self, publishers: set[int]) -> None:
        """Look up the highest sequences of publishers that are not in memory. Those of unsealed events always are."""
        unknown = publishers.difference(self._last_sequences)
        if not unknown:
            return
        if len(self._last_sequences) >= PUBLISHERS_KEPT_MAX:
            self.forget()
            unknown = publishers.difference(self._last_sequences)
        found = self._connection.exec_driver_sql(
            "SELECT publisher, last_sequence FROM publishers WHERE publisher IN (SELECT value FROM json_each(?1))",
            (json.dumps(list(unknown)),),
        )
        stored: dict[int, int] = dict(found.all())
        for publisher in unknown:
            self._last_sequences.setdefault(publisher, stored.get(publisher, -1))

    def forget(self) -> None:
        """Reset to the stored state: read the unsealed tail now, and other publishers when they are needed."""
        found = self._connection.exec_driver_sql(
            "SELECT publisher, max(sequence) FROM events WHERE offset > ? GROUP BY publisher", (self.sealed_until,)
        )
        tail: dict[int, int] = dict(found.all())
        self._last_sequences.clear()
        if tail:
            self._learn(set(tail))
            for publisher, sequence in tail.items():
                self._last_sequences[publisher] = max(sequence, self._last_sequences[publisher])

    def _stored_at(self, wanted: Mapping[int, set[int]]) -> dict[tuple[int, int], int]:
        """Return the offsets of the identities that are stored. Reads only blocks whose runs span the sequences."""
        found: dict[tuple[int, int], int] = {}
        if wanted:
            self._scan(wanted, self.sealed_until + 1, 1 << 62, found)
        for publisher, sequences in wanted.items():
            first, last = min(sequences), max(sequences)
            span = self._connection.exec_driver_sql(
                "SELECT first_block, last_block FROM publishers WHERE publisher = ?", (publisher,)
            ).one_or_none() or (0, -1)
            blocks = self._connection.exec_driver_sql(
                "SELECT blocks.block FROM blocks CROSS JOIN runs ON runs.block = blocks.block AND publisher = ?"
                " WHERE blocks.block BETWEEN ? AND ? AND first_sequence <= ? AND last_sequence >= ?"
                " ORDER BY blocks.block DESC",
                (publisher, *span, last, first),
            ).scalars()
            for block in blocks.all():
                if all((publisher, sequence) in found for sequence in sequences):
                    break
                self._scan({publisher: sequences}, block * BLOCK, block * BLOCK + BLOCK - 1, found)
        return found

    def _scan(self, wanted: Mapping[int, set[int]], first: int, last: int, found: dict[tuple[int, int], int]) -> None:
        """Look for identities between two offsets, with one statement that returns one row."""
        rows = self._connection.exec_driver_sql(
            "SELECT json_group_array(json_array(publisher, sequence, offset)) FROM events WHERE offset BETWEEN ? AND ?"
            " AND publisher IN (SELECT value FROM json_each(?)) AND sequence BETWEEN ? AND ?",
            (
                first,
                last,
                json.dumps(list(wanted)),
                min(min(sequences) for sequences in wanted.values()),
                max(max(sequences) for sequences in wanted.values()),
            ),
        ).scalar_one()
        for publisher, sequence, offset in json.loads(rows):
            if sequence in wanted[publisher]:
                found[publisher, sequence] = offset
