"""Index from the fields of an event's key to the entries of a function that the event invalidates.

moka reports evictions late, so the index may keep a key longer than its entry, but never the other way round: the
index has capacity for twice as many keys as there are entries, and a key that it evicts is removed from the cache too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from zbus.util.memo import Memo

Fields = tuple[str, ...]


class KeyIndex:
    """Map the text of some arguments to the keys of the entries that were loaded with them.

    >>> index = KeyIndex(10, print)
    >>> index.add(7, ("7",)); index.add("7", ("7",)); index.add(8, ("8",))
    >>> index.take(("7",)) == {7, "7"}, index.take(("7",))
    (True, set())
    """

    def __init__(self, capacity: int, remove: Callable[[Hashable], None]) -> None:
        self._remove = remove
        self._keys_by_fields: dict[Fields, set[Hashable]] = {}
        self._fields_by_key = Memo[Hashable, Fields](
            2 * capacity, on_evict=self._on_evict
        )  # the one loaded longest ago first

    def add(self, key: Hashable, fields: Fields) -> None:
        """Register an entry that is about to be loaded."""
        known = self._fields_by_key.pop(key, None)
        if known is not None:
            self._forget(key, known)
        self._keys_by_fields.setdefault(fields, set()).add(key)
        self._fields_by_key[key] = fields

    def take(self, fields: Fields) -> set[Hashable]:
        """Remove and return the keys of the entries to invalidate."""
        found = self._keys_by_fields.pop(fields, set())
        for key in found:
            del self._fields_by_key[key]
        return found

    def clear(self) -> None:
        """Remove all keys."""
        self._keys_by_fields.clear()
        self._fields_by_key.clear()

    def _on_evict(self, key: Hashable, fields: Fields) -> None:
        self._forget(key, fields)
        self._remove(key)

    def _forget(self, key: Hashable, fields: Fields) -> None:
        keys = self._keys_by_fields[fields]
        keys.discard(key)
        if not keys:
            del self._keys_by_fields[fields]
