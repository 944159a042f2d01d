"""The keys of a log for readers: the key of an id, and the ids that match an expression."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec
from sqlalchemy import Connection

from zbus.keys import KEY_BYTES_MAX, KeySet
from zbus.util.memo import Memo

NAMES_KEPT_MAX = 200_000
SETS_KEPT_MAX = 256

_decode = msgspec.json.Decoder(list[tuple[int, str]]).decode
_SINCE = "SELECT json_group_array(json_array(id, key)) FROM keys WHERE id > ?1 AND key >= ?2 AND key < ?3"
_BY_ID = "SELECT json_group_array(json_array(id, key)) FROM keys WHERE id IN (SELECT value FROM json_each(?1))"


class KeyTable:
    """Shared by the threads that read. Keys are only added, so cached entries stay valid."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._matching = Memo[tuple[str, ...], tuple[int, list[int]]](SETS_KEPT_MAX)
        self._lock = threading.Lock()

    def learn(self, connection: Connection, ids: Iterable[int]) -> dict[int, str]:
        """Return the keys of at least these ids. A page keeps the result until it is decoded."""
        names, ids = self._names, set(ids)
        unknown = [id_ for id_ in ids if id_ not in names]
        if unknown and len(names) + len(unknown) > NAMES_KEPT_MAX:
            self._names = names = {}  # pages that still use the old dict keep it
            unknown = list(ids)
        if unknown:
            wanted = msgspec.json.encode(unknown).decode()
            names.update(_decode(connection.exec_driver_sql(_BY_ID, (wanted,)).scalar_one()))
        return names

    def matching(self, connection: Connection, keys: KeySet) -> tuple[list[int], float]:
        """Return the ids that match `keys`, and their share of all keys. Reads only keys added since the last call."""
        with self._lock:
            seen, ids = self._matching.pop(keys.expressions, (0, []))
            newest = int(connection.exec_driver_sql("SELECT ifnull(max(id), 0) FROM keys").scalar_one())
            if newest > seen:
                fresh: dict[int, str] = {}
                for low, high in {_bounds(each) for each in keys.expressions}:
                    fresh.update(_decode(connection.exec_driver_sql(_SINCE, (seen, low, high)).scalar_one()))
                ids = ids + [id_ for id_, name in fresh.items() if id_ <= newest and name in keys]
            # Another thread may have seen a newer snapshot. Going back behind it would add its keys twice.
            self._matching[keys.expressions] = (max(seen, newest), ids)
            return ids, len(ids) / newest if newest else 0.0


def _bounds(expression: str) -> tuple[str, str]:
    """Return the range of text that contains every key of an expression, from its literal prefix."""
    literal = expression.partition("*")[0].removesuffix("$")
    if literal == expression:
        return literal, literal + "\x00"
    # 'a/**' matches 'a' too, so the range starts before the slash.
    literal = literal.removesuffix("/")
    return literal, literal + "\U0010ffff" * (KEY_BYTES_MAX // 4 + 1)
