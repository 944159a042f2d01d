"""Deduplication by identity (publisher, sequence): each is stored once, however often it is retried.

An index over all identities would dirty a page per publisher at each commit. But sequences increase, so the
highest sequence of each publisher, kept in memory, shows that an event is new. Only events with a lower
sequence are looked up in the log, and only in blocks whose runs span that sequence. Events that are found are
compared with the stored ones: the same identity with another key or payload is a conflict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from zbus.ports.log import NO_CONFLICTS, Row
from zbus_log.file.rows import COMPARE, encode_comparison, split_rows
from zbus_log.file.tables import BLOCK, get_low_water

from . import removed_identities

PUBLISHERS_KEPT_MAX = 100_000
COMPARED_BYTES_MAX = 16 * 1024 * 1024  # by one statement, unless a single row has more


class Sorted(NamedTuple):
    """The rows of a batch that are not stored yet, and the offset of every row; see `zbus.ports.log.Stored`."""

    fresh: Sequence[Row]
    offsets: Sequence[int]
    conflicts: Mapping[int, str] = NO_CONFLICTS


class StoredIdentities:
    """Belongs to the writer and uses its connection, on its thread."""

    def __init__(self, connection: Connection, sealed_until: int) -> None:
        self._connection = connection
        self.sealed_until = sealed_until
        self._last_sequences: dict[int, int] = {}
        self.forget()

    def sort(self, batch: Sequence[Row], following: int) -> Sorted:
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
            return Sorted(batch, range(following, following + len(batch)))
        self.forget()  # the loop above included rows that are not stored yet
        self._learn(publishers)
        found = self._one_by_one(batch, following)
        return found._replace(fresh=batch) if len(found.fresh) == len(batch) else found

    def _one_by_one(self, batch: Sequence[Row], following: int) -> Sorted:
        fresh: list[Row] = []
        offsets: list[int] = []
        again: dict[int, int] = {}  # the offsets of rows that are stored already, by index
        conflicts: dict[int, str] = {}
        wanted: dict[int, set[int]] = {}
        for row in batch:
            if row.sequence <= self._last_sequences[row.publisher_id]:
                wanted.setdefault(row.publisher_id, set()).add(row.sequence)
        known = self._stored_at(wanted)
        removed = self._removed(wanted, known)
        for index, row in enumerate(batch):
            identity = row.publisher_id, row.sequence
            stored = known.get(identity)
            if stored is None:
                stored = known[identity] = following + len(fresh)
                fresh.append(row)
                self._last_sequences[row.publisher_id] = max(row.sequence, self._last_sequences[row.publisher_id])
            elif stored < following:
                if identity not in removed:
                    again[index] = stored
            else:
                first = fresh[stored - following]
                if (first.key, first.payload) != (row.key, row.payload):
                    conflicts[index] = first.key
            offsets.append(stored)
        if again:
            conflicts |= self._conflicts(batch, again)
        return Sorted(fresh, offsets, conflicts)

    def _removed(self, wanted: Mapping[int, set[int]], known: dict[tuple[int, int], int]) -> set[tuple[int, int]]:
        """Return those of the wanted identities that retention removed, and add them to the known ones."""
        missing: dict[int, set[int]] = {}
        for publisher, sequences in wanted.items():
            for sequence in sequences:
                if (publisher, sequence) not in known:
                    missing.setdefault(publisher, set()).add(sequence)
        removed = removed_identities.find(self._connection, missing)
        if removed:
            known.update(dict.fromkeys(removed, get_low_water(self._connection)))
        return removed

    def _conflicts(self, batch: Sequence[Row], again: Mapping[int, int]) -> dict[int, str]:
        """Compare rows with the stored events. Returns the keys of those that are other events, by index."""
        found: dict[int, str] = {}
        indexes = list(again)
        at = 0
        for part in split_rows([batch[index] for index in indexes], COMPARED_BYTES_MAX):
            places = indexes[at : at + len(part)]
            at += len(part)
            parameters = encode_comparison(part, [again[index] for index in places])
            differing = self._connection.exec_driver_sql(COMPARE, parameters).scalar_one()
            found.update({places[place]: key for place, key in json.loads(differing)})
        return found

    def _learn(self, publishers: set[int]) -> None:
        """Look up the highest sequences of publishers that are not in memory. Those of unsealed events always are."""
        unknown = publishers.difference(self._last_sequences)
        if not unknown:
            return
        if len(self._last_sequences) >= PUBLISHERS_KEPT_MAX:
            self.forget()
            unknown = publishers.difference(self._last_sequences)
        found = self._connection.exec_driver_sql(
            "SELECT value, max("
            "ifnull((SELECT last_sequence FROM publishers WHERE publisher = value), -1),"
            " ifnull((SELECT last_sequence FROM removed_identities WHERE publisher = value"
            " ORDER BY first_sequence DESC LIMIT 1), -1)) FROM json_each(?1)",
            (json.dumps(list(unknown)),),
        )
        for publisher, sequence in found.all():
            self._last_sequences.setdefault(publisher, sequence)

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
