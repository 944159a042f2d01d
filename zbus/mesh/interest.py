"""The events that this node wants from other nodes: key expressions, since when, and whether its log stores them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from zbus.keys import matches
from zbus.util.memo import Memo

KEYS_KEPT_MAX = 10_000
NEVER = 1 << 63


class KeyInterest(NamedTuple):
    """The interest in one key. Times are in Unix ns, or `NEVER`."""

    since: int  # events published before this are not wanted
    live_since: int  # the same for live subscriptions, which read nothing from the log
    stored: bool  # the log of this node stores them


NO_INTEREST = KeyInterest(NEVER, NEVER, False)


class Interest:
    """The key expressions of all subscriptions, and of what this node stores. Not thread-safe."""

    def __init__(self) -> None:
        self._users: Counter[tuple[str, int, bool]] = Counter()
        self._known = Memo[str, KeyInterest](KEYS_KEPT_MAX, self._match)

    @property
    def expressions(self) -> tuple[str, ...]:
        """All key expressions, each once."""
        return tuple(dict.fromkeys(expression for expression, _, _ in self._users))

    @property
    def stores_any(self) -> bool:
        """Whether the log of this node stores any events of other nodes."""
        return any(store for _, _, store in self._users)

    @property
    def earliest(self) -> int:
        """The earliest time of interest in any key: events published before it are not wanted."""
        return min((since for _, since, _ in self._users), default=0)

    def add(self, expressions: Iterable[str], since_ns: int, store: bool) -> None:
        """Add key expressions. Only events published from `since_ns` on are repaired. `store`: the log stores them."""
        self._users.update((each, since_ns, store) for each in expressions)
        self._known.clear()

    def remove(self, expressions: Iterable[str], since_ns: int, store: bool) -> None:
        """Undo one `add`."""
        self._users.subtract((each, since_ns, store) for each in expressions)
        self._users += Counter()  # drops entries with a count of 0
        self._known.clear()

    def of(self, key: str) -> KeyInterest:
        """Return the interest in `key`.

        >>> interest = Interest()
        >>> interest.add(["shop/**"], 5, store=True)
        >>> interest.of("shop/x").stored, interest.of("audit/x").since == NEVER
        (True, True)
        """
        return self._known[key]

    def _match(self, key: str) -> KeyInterest:
        since = live_since = NEVER
        stored = False
        for expression, moment, store in self._users:
            if matches(expression, key):
                since, stored = min(since, moment), stored or store
                live_since = live_since if store else min(live_since, moment)
        return KeyInterest(since, live_since, stored)
