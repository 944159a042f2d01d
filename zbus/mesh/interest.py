"""What this node wants of others: expressions, since when, and which of them its log records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from zbus.keys import matches
from zbus.util.memo import Memo

KEYS_KEPT_MAX = 10_000
NEVER = 1 << 63


class KeyInterest(NamedTuple):
    """Of one key: since when it is wanted at all, since when by readers that are live only, and whether it is stored.

    In ns; `NEVER` where nobody wants it.
    """

    since: int
    live_since: int
    stored: bool


NO_INTEREST = KeyInterest(NEVER, NEVER, False)


class Interest:
    """Expressions with how many use them, since when, and whether they are to be stored."""

    def __init__(self) -> None:
        self._users: Counter[tuple[str, int, bool]] = Counter()
        self._known = Memo[str, KeyInterest](KEYS_KEPT_MAX, self._match)

    @property
    def expressions(self) -> tuple[str, ...]:
        """All that is wanted."""
        return tuple(dict.fromkeys(expression for expression, _, _ in self._users))

    @property
    def stores_any(self) -> bool:
        """Whether our log keeps anything of others."""
        return any(store for _, _, store in self._users)

    @property
    def earliest(self) -> int:
        """Nothing published before this is wanted."""
        return min((since for _, since, _ in self._users), default=0)

    def add(self, expressions: Iterable[str], since_ns: int, store: bool) -> None:
        """Want these too: from `since_ns` on where something is asked for later, and in our log, if `store`."""
        self._users.update((each, since_ns, store) for each in expressions)
        self._known.clear()

    def remove(self, expressions: Iterable[str], since_ns: int, store: bool) -> None:
        """Undo one `add`."""
        self._users.subtract((each, since_ns, store) for each in expressions)
        self._users += Counter()  # drop what nobody uses
        self._known.clear()

    def of(self, key: str) -> KeyInterest:
        """What is wanted of `key`.

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
