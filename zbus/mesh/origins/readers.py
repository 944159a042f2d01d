"""The nodes that store events of this node's log for their durable subscriptions, and how far each of them has them.

Retention waits for them, but not for a node that was not seen for `retain_remote_s`: it may never come back. The times
are those of a clock that is never set while the machine runs, so one that jumps does not end this. A node
that retention passed is reported, and learns what it missed when it requests events.
"""

from __future__ import annotations

from typing import NamedTuple

from zbus.util.memo import Memo

READERS_MAX = 10_000  # the one that was not seen for longest is forgotten first
SEEN_STEP_NS = 60 * 1_000_000_000  # how precisely it is stored when a node was last seen
# How they are stored: the kind of a name, and the field of a reader.
_FIELDS = {"reader": "offset", "reader_seen": "seen_ns", "reader_removed": "removed", "reader_passed": "passed"}
KINDS = tuple(_FIELDS)


class Reader(NamedTuple):
    """A node, the offset up to which it has stored what it wants of this log, and when it was last seen."""

    node: int
    offset: int
    seen_ns: int
    removed: int | None = None  # the highest offset that was removed from the middle before it was first compared
    passed: int = 0  # the highest offset that was removed when it was reported as passed; 0 while it has what is left


class Readers:
    """The readers of one log. Lives on the loop; `names` may be called on any thread.

    >>> readers = Readers(retain_s=60.0)
    >>> readers.reported(5, 100, 0), readers.reported(7, 80, 0)
    (None, None)
    >>> readers.lowest(now_ns=0), readers.lowest(now_ns=61_000_000_000)
    (Reader(node=7, offset=80, seen_ns=0, removed=None, passed=0), None)
    >>> [reader.node for reader in readers.take_passed(low_water=90)], readers.take_passed(low_water=95)
    ([7], [])
    """

    def __init__(self, retain_s: float) -> None:
        self._retain_ns = int(retain_s * 1e9)
        self._readers = Memo[int, Reader](READERS_MAX)

    def __bool__(self) -> bool:
        return bool(self._readers)

    def load(self, name: str, value: int) -> bool:
        """Take over a stored name. Returns False if it is of another kind."""
        kind, _, node = name.partition("/")
        if kind not in _FIELDS:
            return False
        known = self._readers.get(int(node, 16)) or Reader(int(node, 16), 0, 0)
        self._readers[known.node] = known._replace(**{_FIELDS[kind]: value})
        return True

    def names(self) -> dict[str, int]:
        """Return everything as it is stored."""
        found: dict[str, int] = {}
        for reader in list(self._readers.values()):
            stored = reader._replace(seen_ns=reader.seen_ns - reader.seen_ns % SEEN_STEP_NS)._asdict()
            fields = {kind: stored[field] for kind, field in _FIELDS.items() if stored[field] is not None}
            found |= {f"{kind}/{reader.node:x}": value for kind, value in fields.items()}
        return found

    def forget(self) -> None:
        """Forget all of them: their positions are in a newer state of this log."""
        self._readers.clear()

    def reported(self, node: int, offset: int, now_ns: int) -> None:
        """Note how far a node has stored the events of this log, as it says. After a restore it can be less."""
        known = self._readers.get(node) or Reader(node, offset, now_ns)
        passed = known.passed if offset < known.passed else 0
        self._readers[node] = known._replace(offset=offset, seen_ns=now_ns, passed=passed)
        self._readers.move_to_end(node)

    def limit_seen(self, now_ns: int) -> None:
        """Correct the times that are in the future: the clock was ahead before the machine booted."""
        for each in list(self._readers.values()):
            self._readers[each.node] = each._replace(seen_ns=min(each.seen_ns, now_ns))

    def remove(self, node: int) -> None:
        """Forget a node that needs no events any more."""
        self._readers.pop(node, None)

    def seen(self, node: int, now_ns: int) -> None:
        """Note that a node is connected."""
        if (known := self._readers.get(node)) is not None:
            self._readers[node] = known._replace(seen_ns=now_ns)
            self._readers.move_to_end(node)

    def lowest(self, now_ns: int) -> Reader | None:
        """Return the reader that retention has to wait for, if there is one."""
        waited = [each for each in self._readers.values() if now_ns - each.seen_ns <= self._retain_ns]
        return min(waited, key=lambda each: each.offset, default=None) if self._retain_ns else None

    def take_passed(self, low_water: int, removed_until: int = 0) -> list[Reader]:
        """Return the readers that miss events which were removed, each once until it has everything that is left.

        `removed_until` is the highest offset that was removed from the middle. What was removed there before a reader
        was first compared is not reported: it had not asked for events by then.
        """
        found: list[Reader] = []
        for each in list(self._readers.values()):
            reader = each._replace(removed=removed_until) if each.removed is None else each
            from_middle = removed_until if removed_until > max(reader.removed or 0, reader.offset) else 0
            removed = max(from_middle, low_water if low_water > reader.offset else 0)
            if removed and not reader.passed:
                reader = reader._replace(passed=removed)
                found.append(reader)
            self._readers[reader.node] = reader
        return found
