"""The logs of other nodes that this node knows: how far it has each incarnation, and which past events are owed.

A position is an origin, an incarnation and an offset: everything up to it arrived and is stored, and the log itself has
confirmed it. Past events are owed to an expression that was new when the log was not connected. A mark is the digest
of a log up to an offset, which shows later whether it still has the same events. All of them are stored, so that they
survive a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zbus.ports.lineage import Branch, Mark
from zbus.util.memo import Memo

LOGS_MAX = 100_000
INCARNATIONS_MAX = 8  # of one log; the least recently changed one is forgotten first
NOTHING_OWED: Mapping[str, int] = MappingProxyType({})
KNOWN_KINDS = _POSITION, _OWED, _DIGEST, _DIGEST_AT = "from", "owed", "digest", "digest-at"


class KnownLogs:
    """The positions and the debts of all logs. Lives on the loop; `names` may be called on any thread.

    >>> logs = KnownLogs()
    >>> logs.reached(5, 7, 100), logs.owe(["shop/**"])
    (None, {'owed/5/shop/**': 0})
    >>> logs.of(5), logs.owed_by(5), logs.names()
    ({7: 100}, {'shop/**': 0}, {'from/5/7': 100, 'owed/5/shop/**': 0})
    """

    # A mark has two names, because a name has one number. Both are stored in one step.

    def __init__(self) -> None:
        # The inner dicts are replaced and never changed, because another thread may read them.
        self._reached = Memo[int, dict[int, int]](LOGS_MAX)  # the least recently changed one comes first
        self._settled = Memo[int, dict[int, int]](LOGS_MAX)  # the same for incarnations that ended; not stored
        self._owed: dict[int, dict[str, int]] = {}
        self._marks = Memo[int, dict[int, Mark]](LOGS_MAX)  # by incarnation
        self._split = Memo[int, dict[int, int]](LOGS_MAX)  # incarnations with two histories: the offset before

    def load(self, name: str, value: int) -> bool:
        """Take over a stored name. Returns False if it is of another kind.

        Version 0.1 stored no incarnation; its number is 0. Nodes without a log have even ids and no position.
        """
        kind, _, rest = name.partition("/")
        if kind not in KNOWN_KINDS:
            return False
        origin, _, detail = rest.partition("/")
        if not int(origin, 16) & 1:
            return True
        if kind == _OWED:
            self._owed[int(origin, 16)] = self.owed_by(int(origin, 16)) | {detail: value}
        elif kind == _POSITION:
            self.reached(int(origin, 16), int(detail or "0", 16), value)
        else:
            marks, incarnation = self._marks.get(int(origin, 16), {}), int(detail or "0", 16)
            mark = marks.get(incarnation, Mark(incarnation, 0, 0))
            mark = mark._replace(digest=value) if kind == _DIGEST else mark._replace(offset=value)
            self._marks[int(origin, 16)] = marks | {incarnation: mark}
        return True

    def names(self) -> dict[str, int]:
        """Return everything as it is stored."""
        reached, owed = list(self._reached.items()), list(self._owed.items())
        names = {f"{_POSITION}/{origin:x}/{each:x}": offset for origin, of in reached for each, offset in of.items()}
        for origin, marks in list(self._marks.items()):
            for each in [mark for mark in marks.values() if mark.incarnation in self._reached.get(origin, ())]:
                where = f"{origin:x}/{each.incarnation:x}"
                names |= {f"{_DIGEST}/{where}": each.digest, f"{_DIGEST_AT}/{where}": each.offset}
        return names | {f"{_OWED}/{origin:x}/{each}": after for origin, of in owed for each, after in of.items()}

    def of(self, origin: int) -> dict[int, int]:
        """Return the incarnations of a log that are known, each with the offset that was reached in it."""
        reached, settled = self._reached.get(origin, {}), self._settled.get(origin, {})
        found = reached | {each: max(offset, reached.get(each, 0)) for each, offset in settled.items()}
        return self.certain(origin, found) if origin in self._split else found

    def split(self, origin: int, incarnation: int, before: int) -> None:
        """Note that an incarnation has two histories, so that a position in it does not say in which one.

        It was copied while it ran, or reverted. Positions in it end before it from now on, so that the incarnation
        that follows is asked for all events since `before`.
        """
        split = [each for each in self._split.get(origin, {}).items() if each[0] != incarnation]
        self._split[origin] = dict(split[1 - INCARNATIONS_MAX :]) | {incarnation: before}
        self.rewound(origin, before)

    def is_split(self, origin: int, incarnation: int) -> bool:
        """Return whether an incarnation has two histories."""
        return incarnation in self._split.get(origin, ())

    def certain(self, origin: int, known: Mapping[int, int]) -> dict[int, int]:
        """Return positions in the incarnations of a log, without those that may be in either of two histories."""
        split = self._split.get(origin, {})
        return {each: min(offset, split.get(each, offset)) for each, offset in known.items()}

    def reached(self, origin: int, incarnation: int, offset: int) -> None:
        """Note that everything up to an offset arrived and is stored."""
        known = self._reached.get(origin, {})
        others = [(each, at) for each, at in known.items() if each != incarnation][1 - INCARNATIONS_MAX :]
        offset = min(offset, self._split.get(origin, {}).get(incarnation, offset))
        self._reached[origin] = dict(others) | {incarnation: max(offset, known.get(incarnation, 0))}
        self._reached.move_to_end(origin)

    def settled(self, origin: int, incarnation: int, offset: int) -> None:
        """Note how far the events of an incarnation arrived that has ended. The log did not confirm it."""
        others = [each for each in self._settled.get(origin, {}).items() if each[0] != incarnation]
        self._settled[origin] = dict(others[1 - INCARNATIONS_MAX :]) | {incarnation: offset}

    def rewound(self, origin: int, shared: int) -> None:
        """Forget what is known of a log after an offset, because it was replaced by an older one."""
        for known in (self._reached, self._settled):
            if origin in known:
                known[origin] = {each: min(offset, shared) for each, offset in known[origin].items()}
        self._marks[origin] = {
            each: mark for each, mark in self._marks.get(origin, {}).items() if mark.offset <= shared
        }

    def forget(self) -> None:
        """Forget all positions: the log of this node does not have what they say."""
        self._reached.clear()

    def marked(self, origin: int, mark: Mark) -> None:
        """Remember what a log had when it was asked."""
        others = [each for each in self._marks.get(origin, {}).items() if each[0] != mark.incarnation]
        self._marks[origin] = dict(others[1 - INCARNATIONS_MAX :]) | {mark.incarnation: mark}

    def mark(self, origin: int, branch: Branch) -> Mark | None:
        """Return the mark of an incarnation, or else of the one before it, if there is one."""
        marks = self._marks.get(origin, {})
        return marks.get(branch.id) or marks.get(branch.parent)

    def owed_by(self, origin: int) -> dict[str, int]:
        """Return the expressions whose past events a log owes, each with the offset after which they are missing."""
        return self._owed.get(origin, {})

    def owe(self, expressions: Sequence[str], others: Sequence[int] = ()) -> dict[str, int]:
        """Note that all known logs, and some others, owe the past events of expressions. Returns the names to store."""
        before = self.names()
        for origin in dict.fromkeys([*self._reached, *others]):
            self._owed[origin] = dict.fromkeys(expressions, 0) | self.owed_by(origin)
        return {name: value for name, value in self.names().items() if name not in before}

    def fetched(self, origin: int, expression: str, reached: int | None) -> None:
        """Note how far past events were fetched; None means that nothing is owed any more."""
        owed = {each: after for each, after in self.owed_by(origin).items() if each != expression}
        if reached is not None:
            owed[expression] = reached
        self._owed[origin] = owed
        if not owed:
            self._owed.pop(origin)
