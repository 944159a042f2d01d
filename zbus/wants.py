"""What this node wants of others: expressions, since when, and which of them its log records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .keys import matches

KEYS_KEPT_MAX = 10_000


class Wants:
    """Expressions with how many use them. Of one that several use, the earliest `since` counts."""

    def __init__(self) -> None:
        self._users: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self._recorded: dict[str, int] = {}
        self._known: dict[str, int | None] = {}
        self._recorded_keys: dict[str, bool] = {}

    @property
    def expressions(self) -> tuple[str, ...]:
        """All that is wanted."""
        return tuple(self._users)

    @property
    def recorded(self) -> tuple[str, ...]:
        """What the log of this node keeps of others."""
        return tuple(self._recorded)

    @property
    def earliest(self) -> int:
        """Nothing published before this is wanted; in ns."""
        return min(self._since.values(), default=0)

    def add(self, expressions: Iterable[str], since_ns: int, record: bool) -> None:
        """Want these too: from `since_ns` on where a node is met later, and in our log, if `record`."""
        for each in expressions:
            self._users[each] = self._users.get(each, 0) + 1
            self._since[each] = min(since_ns, self._since.get(each, since_ns))
            if record:
                self._recorded[each] = self._recorded.get(each, 0) + 1
        self._forget()

    def remove(self, expressions: Iterable[str], record: bool) -> None:
        """Undo one `add`."""
        for each in expressions:
            for users in (self._users, self._recorded) if record else (self._users,):
                users[each] -= 1
                if not users[each]:
                    del users[each]
            if each not in self._users:
                del self._since[each]
        self._forget()

    def since(self, key: str) -> int | None:
        """Since when events on `key` are wanted; None if they are not."""
        if key in self._known:
            return self._known[key]
        found = min((since for each, since in self._since.items() if matches(each, key)), default=None)
        if len(self._known) >= KEYS_KEPT_MAX:
            self._known.clear()
        self._known[key] = found
        return found

    def records(self, key: str) -> bool:
        """Whether our log keeps events of others on `key`."""
        if not self._recorded:
            return False
        found = self._recorded_keys.get(key)
        if found is None:
            if len(self._recorded_keys) >= KEYS_KEPT_MAX:
                self._recorded_keys.clear()
            found = self._recorded_keys[key] = _any_matches(self.recorded, key)
        return found

    def _forget(self) -> None:
        self._known.clear()
        self._recorded_keys.clear()


def _any_matches(expressions: Sequence[str], key: str) -> bool:
    return any(matches(each, key) for each in expressions)
