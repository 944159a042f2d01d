"""The nodes that store events of this node's log for their durable subscriptions, and how far each of them has them.

Retention waits for them, but not for a node that was not seen for `retain_remote_s`: it may never come back. A node
that retention passed is reported, and learns what it missed when it requests events.
"""

from __future__ import annotations

from typing import NamedTuple

from zbus.util.memo import Memo

READERS_MAX = 10_000  # the one that was not seen for longest is forgotten first
SEEN_STEP_NS = 60 * 1_000_000_000  # how precisely it is stored when a node was last seen
_OFFSET, _SEEN = "reader", "reader_seen"
KINDS = (_OFFSET, _SEEN)


class Reader(NamedTuple):
    """A node, the offset up to which it has stored what it wants of this log, and when it was last seen."""

    node: int
    offset: int
    seen_ns: int


class Readers:
    """The readers of one log. Lives on the loop; `names` may be called on any thread.

    >>> readers = Readers(retain_s=60.0)
    >>> readers.reported(5, 100, 0), readers.reported(7, 80, 0)
    (None, None)
    >>> readers.lowest(now_ns=0), readers.lowest(now_ns=61_000_000_000)
    (Reader(node=7, offset=80, seen_ns=0), None)
    >>> readers.take_passed(low_water=90)
    [Reader(node=7, offset=80, seen_ns=0)]
    """

    def __init__(self, retain_s: float) -> None:
        self._retain_ns = int(retain_s * 1e9)
        self._readers = Memo[int, Reader](READERS_MAX)

    def __bool__(self) -> bool:
        return bool(self._readers)

    def load(self, name: str, value: int) -> bool:
        """Take over a stored name. Returns False if it is of another kind."""
        kind, _, node = name.partition("/")
        if kind not in KINDS:
            return False
        known = self._readers.get(int(node, 16)) or Reader(int(node, 16), 0, 0)
        changed = known._replace(offset=value) if kind == _OFFSET else known._replace(seen_ns=value)
        self._readers[known.node] = changed
        return True

    def names(self) -> dict[str, int]:
        """Return everything as it is stored."""
        found: dict[str, int] = {}
        for reader in list(self._readers.values()):
            found[f"{_OFFSET}/{reader.node:x}"] = reader.offset
            found[f"{_SEEN}/{reader.node:x}"] = reader.seen_ns - reader.seen_ns % SEEN_STEP_NS
        return found

    def forget(self) -> None:
        """Forget all of them: their positions are in a newer state of this log."""
        self._readers.clear()

    def reported(self, node: int, offset: int, now_ns: int) -> None:
        """Note how far a node has stored the events of this log, as it says. After a restore it can be less."""
        self._readers[node] = Reader(node, offset, now_ns)
        self._readers.move_to_end(node)

    def seen(self, node: int, now_ns: int) -> None:
        """Note that a node is connected."""
        if (known := self._readers.get(node)) is not None:
            self._readers[node] = known._replace(seen_ns=now_ns)
            self._readers.move_to_end(node)

    def lowest(self, now_ns: int) -> Reader | None:
        """Return the reader that retention has to wait for, if there is one."""
        waited = [each for each in self._readers.values() if now_ns - each.seen_ns <= self._retain_ns]
        return min(waited, key=lambda each: each.offset, default=None) if self._retain_ns else None

    def take_passed(self, low_water: int) -> list[Reader]:
        """Return the readers that miss events which retention has removed, and forget them."""
        passed = [each for each in self._readers.values() if each.offset < low_water]
        for each in passed:
            del self._readers[each.node]
        return passed
