"""The ledger of `zbus demo`: published events, compared by identity with the events that each part received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .worker import Identity


@dataclass
class Watch:
    """One subscriber of the demo: the keys that it must receive, and the events that it received."""

    expression: str
    keys: frozenset[str]  # listed by hand, so that the bus is not checked against itself
    seen: Counter[Identity] = field(default_factory=Counter)
    position: int = 0  # offset of its last event; subscribers receive events in the order of the log


@dataclass
class Ledger:
    """All counts of the demo, and the conclusions from them."""

    published: dict[Identity, str] = field(default_factory=dict)  # identity to key
    acknowledged: set[Identity] = field(default_factory=set)
    heads: dict[str, int] = field(default_factory=dict)  # key to the offset of its last event
    flood: set[Identity] = field(default_factory=set)  # published at full speed and acknowledged; without a subscriber
    watches: list[Watch] = field(default_factory=list)
    handled: Counter[Identity] = field(default_factory=Counter)
    seen_again: set[Identity] = field(default_factory=set)
    stored: set[Identity] = field(default_factory=set)
    replayed: set[Identity] = field(default_factory=set)
    replay_expected: set[Identity] = field(default_factory=set)

    @property
    def delivered(self) -> int:
        """Number of events delivered to the subscribers in this process."""
        return sum(watch.seen.total() for watch in self.watches)

    @property
    def progress(self) -> int:
        """A number that changes with every event that is published, delivered, handled or read."""
        sets = (self.acknowledged, self.flood, self.stored, self.replayed)
        return sum(map(len, sets)) + self.delivered + self.handled.total()

    def arrived(self, position: int, keys: Iterable[str] | None = None) -> bool:
        """Return whether a subscriber at `position` is past the last event of `keys`, or of all keys."""
        heads = self.heads.values() if keys is None else [self.heads.get(key, 0) for key in keys]
        return position >= max(heads, default=0)

    @property
    def redelivered(self) -> int:
        """Number of events that the killed subscriber had handled but not acknowledged, and handled again."""
        return sum(times - 1 for times in self.handled.values())

    @property
    def lost(self) -> set[Identity]:
        """Events that the log acknowledged and that are missing in the log, at a subscriber or in the replay."""
        missing = (self.acknowledged | self.flood) - self.stored
        missing |= self.acknowledged - self.handled.keys()
        missing |= self.replay_expected - self.replayed
        for watch in self.watches:
            missing |= {each for each in self.acknowledged if self.published[each] in watch.keys} - watch.seen.keys()
        return missing

    @property
    def wrong(self) -> list[str]:
        """Broken guarantees other than losses, as messages."""
        found = []
        if not self.acknowledged or not self.replay_expected:
            found.append("too few events were published to prove anything")
        if twice := sum(times > 1 for watch in self.watches for times in watch.seen.values()):
            found.append(f"{twice} events were delivered twice in this process")
        if strange := sum(self.published.get(each) not in watch.keys for watch in self.watches for each in watch.seen):
            found.append(f"{strange} events were delivered to a subscriber of other keys")
        if self.seen_again:
            found.append(f"{len(self.seen_again)} events were redelivered although their acknowledgement was durable")
        if early := self.replayed - self.replay_expected:
            found.append(f"{len(early)} replayed events are older than the start time of the replay")
        return found
