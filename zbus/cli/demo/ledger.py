"""The ledger of `zbus demo`: what was published, against what each part saw, compared by identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .worker import Identity


@dataclass
class Watch:
    """One subscriber of the demo: the keys that it must see, and what it saw."""

    expression: str
    keys: frozenset[str]  # written down by hand, so that the bus is not checked against itself
    seen: Counter[Identity] = field(default_factory=Counter)
    position: int = 0  # the offset of the last event that it saw; subscribers receive events in the order of the log


@dataclass
class Ledger:
    """Everything that the demo counted, and the conclusions."""

    published: dict[Identity, str] = field(default_factory=dict)  # to its key
    acknowledged: set[Identity] = field(default_factory=set)
    heads: dict[str, int] = field(default_factory=dict)  # of each key, the offset of its last event
    flood: set[Identity] = field(default_factory=set)  # published at full speed, and acknowledged; only stored
    watches: list[Watch] = field(default_factory=list)
    handled: Counter[Identity] = field(default_factory=Counter)
    seen_again: set[Identity] = field(default_factory=set)
    stored: set[Identity] = field(default_factory=set)
    replayed: set[Identity] = field(default_factory=set)
    replay_expected: set[Identity] = field(default_factory=set)

    @property
    def delivered(self) -> int:
        """Events handed to the subscribers in this process."""
        return sum(watch.seen.total() for watch in self.watches)

    @property
    def progress(self) -> int:
        """A number that changes whenever anything happens."""
        sets = (self.acknowledged, self.flood, self.stored, self.replayed)
        return sum(map(len, sets)) + self.delivered + self.handled.total()

    def arrived(self, position: int, keys: Iterable[str] | None = None) -> bool:
        """Return whether a subscriber at `position` is past the last event of `keys`, or of all keys."""
        heads = self.heads.values() if keys is None else [self.heads.get(key, 0) for key in keys]
        return position >= max(heads, default=0)

    @property
    def redelivered(self) -> int:
        """Events that the killed subscriber had handled, but not acknowledged, and saw a second time."""
        return sum(times - 1 for times in self.handled.values())

    @property
    def lost(self) -> set[Identity]:
        """Acknowledged by the log, and missing somewhere: in the log, at any subscriber, in the replay."""
        missing = (self.acknowledged | self.flood) - self.stored
        missing |= self.acknowledged - self.handled.keys()
        missing |= self.replay_expected - self.replayed
        for watch in self.watches:
            missing |= {each for each in self.acknowledged if self.published[each] in watch.keys} - watch.seen.keys()
        return missing

    @property
    def wrong(self) -> list[str]:
        """Promises that were broken, apart from losses."""
        found = []
        if not self.acknowledged or not self.replay_expected:
            found.append("too few events were published for anything to be shown")
        if twice := sum(times > 1 for watch in self.watches for times in watch.seen.values()):
            found.append(f"{twice} events were delivered twice in this process")
        if strange := sum(self.published.get(each) not in watch.keys for watch in self.watches for each in watch.seen):
            found.append(f"{strange} events were delivered to a subscriber that did not ask for them")
        if self.seen_again:
            found.append(f"{len(self.seen_again)} events were seen again after their acknowledgement was durable")
        if early := self.replayed - self.replay_expected:
            found.append(f"{len(early)} replayed events are older than the time that was asked for")
        return found
