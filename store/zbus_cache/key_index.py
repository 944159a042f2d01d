"""Which entries of a function an event means, by the text of the arguments that its key names.

moka does not tell in time what it evicted, so what is known of an entry here may outlive the entry, but never the
other way round: room is for twice the entries, and whatever has to go for want of room takes its entry with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from zbus.util.memo import Memo

Fields = tuple[str, ...]


class KeyIndex:
    """From the texts of some arguments to the entries that were made of them.

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
        """An entry of this key is about to be loaded."""
        known = self._fields_by_key.pop(key, None)
        if known is not None:
            self._forget(key, known)
        self._keys_by_fields.setdefault(fields, set()).add(key)
        self._fields_by_key[key] = fields

    def take(self, fields: Fields) -> set[Hashable]:
        """The entries that fall; they are known no more."""
        found = self._keys_by_fields.pop(fields, set())
        for key in found:
            del self._fields_by_key[key]
        return found

    def clear(self) -> None:
        """All fell."""
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
