"""Lineage: which incarnations a log has had, and so which of its offsets another node or a cursor can rely on.

Each opening of a log by an owner begins an incarnation with a random id. A log that was restored or copied has the
incarnations of its backup, and then its own. Two logs with the same id therefore share the offsets up to the last
incarnation that they have in common, and no others: the same offset after that is another event.

A process that was reverted to a snapshot of its machine continues its incarnation with other events. Only a digest of
the events shows that, so nodes keep a mark of each log that they know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from zbus.event import NUMBER_MAX

_Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]


class Incarnation(NamedTuple):
    """One opening of a log by an owner."""

    id: int  # random, of at most 62 bits; 0 for all openings by version 0.1, which did not count them
    first: int  # the offset of the first event that it can store
    started_at: int = 0  # Unix ns
    host: str = ""


class Branch(NamedTuple):
    """The current incarnation of a log as frames and beacons name it: where it begins, and what it continues."""

    id: _Number
    first: _Number
    parent: _Number  # the incarnation before it, or itself if it is the first

    @property
    def before(self) -> int:
        """The last offset that it has in common with its parent."""
        return max(0, self.first - 1)

    def shared(self, known: Mapping[int, int]) -> int | None:
        """Return what `Lineage.shared` returns, or None if only the whole lineage can tell.

        >>> Branch(9, 101, 7).shared({7: 180}), Branch(9, 101, 7).shared({5: 180})
        (100, None)
        """
        if self.id in known:
            return known[self.id]
        return min(known[self.parent], self.before) if self.parent in known else None


class Mark(NamedTuple):
    """The digest of the events of a log up to an offset, as the log itself has named it."""

    incarnation: _Number  # the current one at that time
    offset: _Number
    digest: _Number  # as `digest_number` returns it; 0 if it is unknown


def digest_number(digest: bytes) -> int:
    """Return the first 62 bits of a digest, which can be stored as a position; 0 if the digest is unknown.

    >>> digest_number(bytes.fromhex("ffffffffffffffff0000")) == (1 << 62) - 1, digest_number(b"")
    (True, 0)
    """
    return int.from_bytes(digest[:8]) >> 2


NO_MARK = Mark(0, 0, 0)
NO_BRANCH = Branch(0, 0, 0)  # of a node without a log, or of version 0.1


class Lineage(NamedTuple):
    """The incarnations of a log, oldest first. The last one is current.

    >>> lineage = Lineage((Incarnation(7, 1), Incarnation(9, 101)))
    >>> lineage.until(7), lineage.until(8)
    (100, None)
    >>> lineage.of(100), lineage.of(101), lineage.of(0)
    (7, 9, None)
    >>> lineage.shared({7: 180}), lineage.shared({9: 180}), lineage.shared({8: 180})
    (100, 180, None)
    """

    incarnations: tuple[Incarnation, ...]

    @property
    def current(self) -> Incarnation:
        """The incarnation that stores events now."""
        return self.incarnations[-1]

    @property
    def branch(self) -> Branch:
        """The current incarnation as frames and beacons name it."""
        parent = self.incarnations[max(-len(self.incarnations), -2)]
        return Branch(self.current.id, self.current.first, parent.id)

    def of(self, offset: int) -> int | None:
        """Return the id of the incarnation that stored, or will store, an offset; None if that is unknown."""
        return next((each.id for each in reversed(self.incarnations) if each.first <= offset), None)

    def until(self, incarnation: int) -> int | None:
        """Return the last offset that this log can have in common with a log in `incarnation`; None if unknown."""
        following = NUMBER_MAX + 1
        for each in reversed(self.incarnations):
            if each.id == incarnation:
                return following - 1
            following = each.first
        return None

    def before(self, incarnation: int) -> int:
        """Return the last offset before an incarnation began; 0 if it is unknown."""
        return next((max(0, each.first - 1) for each in self.incarnations if each.id == incarnation), 0)

    def shared(self, known: Mapping[int, int]) -> int | None:
        """Return the highest offset that is the same event here, for someone who knows some incarnations.

        `known` has the offset that was reached in each of them. None means that nothing is certain to be shared.
        """
        following = NUMBER_MAX + 1
        for each in reversed(self.incarnations):
            if each.id in known:
                return min(known[each.id], following - 1)
            following = each.first
        return None
