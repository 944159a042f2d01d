"""Which entries of a function an event means, by the text of the arguments that its key names.

moka does not tell in time what it evicted, so what is known of an entry here may outlive the entry, but never the
other way round: room is for twice the entries, and whatever has to go for want of room takes its entry with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from zbus.util.memo import Memo

Tag = tuple[str, ...]


class KeyIndex:
    """From the texts of some arguments to the entries that were made of them.

    >>> tags = KeyIndex(10, print)
    >>> tags.add(7, ("7",)); tags.add("7", ("7",)); tags.add(8, ("8",))
    >>> tags.take(("7",)) == {7, "7"}, tags.take(("7",))
    (True, set())
    """

    def __init__(self, capacity: int, remove: Callable[[Hashable], None]) -> None:
        self._remove = remove
        self._keys: dict[Tag, set[Hashable]] = {}
        self._tags = Memo[Hashable, Tag](2 * capacity, on_evict=self._evicted)  # the one loaded longest ago first

    def add(self, key: Hashable, tag: Tag) -> None:
        """An entry of this key is about to be loaded."""
        known = self._tags.pop(key, None)
        if known is not None:
            self._forget(key, known)
        self._keys.setdefault(tag, set()).add(key)
        self._tags[key] = tag

    def take(self, tag: Tag) -> set[Hashable]:
        """The entries that fall; they are known no more."""
        found = self._keys.pop(tag, set())
        for key in found:
            del self._tags[key]
        return found

    def clear(self) -> None:
        """All fell."""
        self._keys.clear()
        self._tags.clear()

    def _evicted(self, key: Hashable, tag: Tag) -> None:
        self._forget(key, tag)
        self._remove(key)

    def _forget(self, key: Hashable, tag: Tag) -> None:
        keys = self._keys[tag]
        keys.discard(key)
        if not keys:
            del self._keys[tag]
