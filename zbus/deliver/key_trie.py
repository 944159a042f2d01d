"""Trie from keys to subscriptions, over the segments of their key expressions.

Zenoh's Python binding has a cost per local subscriber at each put. Here, a publish costs the same with 10 and with
10,000 subscriptions: the trie is walked once per key, and the result is kept until a subscription is added or removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

from zbus.keys import segment_pattern
from zbus.util.memo import Memo

T = TypeVar("T")
ROUTES_KEPT_MAX = 16_384


class _Node(Generic[T]):
    __slots__ = ("children", "loops", "patterns", "values")

    def __init__(self, loops: bool = False) -> None:
        self.children: dict[str, _Node[T]] = {}
        self.patterns: _Patterns | None = None
        self.values: dict[T, int] = {}
        self.loops = loops  # the node of a `**`: it matches any further segment except one that begins with `@`


class _Patterns:
    """Segments that contain `$*`, indexed by how they begin and end, so that few of many are tried."""

    __slots__ = ("_by_ends",)

    def __init__(self) -> None:
        # (lengths of beginning and end) -> (beginning, end) -> segment -> pattern
        self._by_ends: dict[tuple[int, int], dict[tuple[str, str], dict[str, re.Pattern[str]]]] = {}

    def add(self, segment: str) -> None:
        lengths, ends = _ends(segment)
        self._by_ends.setdefault(lengths, {}).setdefault(ends, {})[segment] = segment_pattern(segment)

    def remove(self, segment: str) -> None:
        lengths, ends = _ends(segment)
        group = self._by_ends[lengths]
        del group[ends][segment]
        if not group[ends]:
            del group[ends]
        if not group:
            del self._by_ends[lengths]

    def matching(self, segment: str) -> Iterator[str]:
        size = len(segment)
        for (first, last), group in self._by_ends.items():
            if first + last <= size:
                for name, pattern in group.get((segment[:first], segment[size - last :]), {}).items():
                    if pattern.fullmatch(segment):
                        yield name


def _ends(segment: str) -> tuple[tuple[int, int], tuple[str, str]]:
    first, last = segment.partition("$*")[0], segment.rpartition("$*")[2]
    return (len(first), len(last)), (first, last)


class KeyTrie(Generic[T]):
    """Maps keys to the values (subscriptions) whose expressions match.

    >>> trie = KeyTrie[str]()
    >>> trie.add("shop/*", "one"); trie.add("**", "two")
    >>> sorted(trie.routes("shop/orders"))
    ['one', 'two']
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()
        self._routes = Memo[str, tuple[T, ...]](ROUTES_KEPT_MAX, self._walk)

    def add(self, expression: str, value: T) -> None:
        """Add `value` for every key that `expression` (canonical) matches."""
        node = self._root
        for segment in expression.split("/"):
            child = node.children.get(segment)
            if child is None:
                child = node.children[segment] = _Node(loops=segment == "**")
                if "$*" in segment:
                    node.patterns = node.patterns or _Patterns()
                    node.patterns.add(segment)
            node = child
        node.values[value] = node.values.get(value, 0) + 1
        self._routes.clear()

    def remove(self, expression: str, value: T) -> None:
        """Undo one `add`, and remove branches that are no longer used."""
        path = [self._root]
        segments = expression.split("/")
        for segment in segments:
            path.append(path[-1].children[segment])
        values = path[-1].values
        values[value] -= 1
        if not values[value]:
            del values[value]
        for node, parent, segment in zip(path[:0:-1], path[-2::-1], reversed(segments), strict=True):
            if node.values or node.children:
                break
            del parent.children[segment]
            if parent.patterns is not None and "$*" in segment:
                parent.patterns.remove(segment)
        self._routes.clear()

    def routes(self, key: str) -> tuple[T, ...]:
        """Return the values whose expressions match `key`, each once."""
        return self._routes[key]

    def _walk(self, key: str) -> tuple[T, ...]:
        active = _with_empty_match([self._root])
        for segment in key.split("/"):
            literal_only = segment[0] == "@"
            following: list[_Node[T]] = []
            for node in active:
                child = node.children.get(segment)
                if child is not None:
                    following.append(child)
                if literal_only:
                    continue
                if node.loops:
                    following.append(node)
                star = node.children.get("*")
                if star is not None:
                    following.append(star)
                if node.patterns is not None:
                    following += [node.children[name] for name in node.patterns.matching(segment)]
            active = _with_empty_match(following)
        return tuple(dict.fromkeys(value for node in active for value in node.values))


def _with_empty_match(nodes: list[_Node[T]]) -> list[_Node[T]]:
    """Add the `**` children, because `**` also matches zero segments; each node once."""
    found = dict.fromkeys(nodes)
    for node in nodes:
        deep = node.children.get("**")
        while deep is not None and deep not in found:
            found[deep] = None
            deep = deep.children.get("**")
    return list(found)
