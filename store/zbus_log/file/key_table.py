"""The keys of a log for readers: the key of an id, and the keys that match an expression."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection

from zbus.keys import KeySet
from zbus.util.memo import Memo

from .checksum import key_number
from .key_condition import Condition, condition_of

NAMES_KEPT_MAX = 200_000
SETS_KEPT_MAX = 256
IDS_MAX = 512  # looking up more ids in each block takes longer than testing all keys of the block
CANDIDATES_MAX = 10  # for each key that matches: with more of them, the condition selects too little

_decode = msgspec.json.Decoder(list[tuple[int, str]]).decode
_BY_ID = "SELECT json_group_array(json_array(id, key)) FROM keys WHERE id IN (SELECT value FROM json_each(?1))"
# Keys are listed from the table, whose names the index of each block proves, but counted by the index by name. `+`
# keeps SQLite from using the range of ids: for all keys, the index by name is the shorter way.
_LISTED = """
SELECT json_group_array(json_array(id, key)) FROM
(SELECT id, key FROM keys NOT INDEXED WHERE {id} > :seen AND {id} <= :newest AND {condition} LIMIT :limit)
"""
_COUNTED = "SELECT count(*) FROM keys WHERE {id} > :seen AND {id} <= :newest AND {condition}"


class Matching(NamedTuple):
    """The keys that match some expressions, as of the newest key that is taken into account."""

    condition: Condition
    newest: int = 0  # its id
    keys: int = 0  # the number of keys in the table
    candidates: int = 0  # the number of keys for which the condition is true
    matching: int = 0  # the number of keys that match
    ids: Sequence[int] | None = ()  # None if they are many and the condition is exact

    @property
    def share(self) -> float:
        """The share of all keys that match."""
        return self.matching / self.keys if self.keys else 0.0

    @property
    def few(self) -> Sequence[int] | None:
        """The ids, if reading by ids costs less than reading by the condition; otherwise None."""
        if self.ids is None or (self.matching > IDS_MAX and self.candidates <= CANDIDATES_MAX * self.matching):
            return None
        return self.ids


class KeyTable:
    """Shared by the threads that read. An id is never used for another key, so cached entries stay valid."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, int]] = {}  # with the number of each key in checksums
        self._matching = Memo[tuple[str, ...], Matching](SETS_KEPT_MAX)
        self._lock = threading.Lock()

    def learn(self, connection: Connection, ids: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Return the keys of at least these ids. A page keeps the result until it is decoded."""
        names, ids = self._names, set(ids)
        unknown = [id_ for id_ in ids if id_ not in names]
        if unknown and len(names) + len(unknown) > NAMES_KEPT_MAX:
            self._names = names = {}  # pages that still use the old dict keep it
            unknown = list(ids)
        if unknown:
            wanted = msgspec.json.encode(unknown).decode()
            found = _decode(connection.exec_driver_sql(_BY_ID, (wanted,)).scalar_one())
            names.update({id_: (name, key_number(name)) for id_, name in found})
        return names

    def matching(self, connection: Connection, keys: KeySet) -> Matching:
        """Return the keys that match some expressions. Reads only keys that were added since the last call."""
        with self._lock:
            known = self._matching.pop(keys.expressions, None) or Matching(condition_of(keys))
            newest = int(connection.exec_driver_sql("SELECT ifnull(max(id), 0) FROM keys").scalar_one())
            # Another thread may have seen a newer snapshot. Going back behind it would add its keys twice.
            if newest > known.newest:
                known = _updated(connection, keys, known, newest)
            self._matching[keys.expressions] = known
            return known


def _updated(connection: Connection, keys: KeySet, known: Matching, newest: int) -> Matching:
    """Take the keys up to `newest` into account."""
    condition, ids = known.condition, known.ids
    limit = IDS_MAX + 1 if condition.exact else -1
    values = condition.values | {"seen": known.newest, "newest": newest, "limit": limit}

    def ask(statement: str, condition: str) -> Any:
        statement = statement.format(id="id" if known.newest else "+id", condition=condition)
        return connection.exec_driver_sql(statement, values).scalar_one()

    if known.newest:
        total = known.keys + int(ask(_COUNTED, "true"))
    else:
        total = int(connection.exec_driver_sql("SELECT count(*) FROM keys").scalar_one())
    if ids is not None:
        found = _decode(ask(_LISTED, condition.sql))
        candidates = known.candidates + len(found)
        if candidates <= IDS_MAX or not condition.exact:
            ids = [*ids, *(id_ for id_, name in found if condition.exact or name in keys)]
            return Matching(condition, newest, total, candidates, len(ids), ids)
    matching = known.matching + int(ask(_COUNTED, condition.sql))
    return Matching(condition, newest, total, matching, matching, None)
