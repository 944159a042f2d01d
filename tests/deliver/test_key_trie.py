"""The trie of subscriptions: exactly what matching key by key would give, at a cost that does not grow."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from zbus.deliver.key_trie import ROUTES_KEPT_MAX, KeyTrie
from zbus.keys import check_expression, matches

KEYS = ["a", "b", "a/a", "a/b", "ab/b", "a/b/a", "a/@a", "a/@a/b", "@a", "a/ab/b/a", "b/b/b/b"]

segments = st.sampled_from(["a", "b", "ab", "@a", "*", "**", "a$*", "$*b", "$*"])
expressions = st.lists(segments, min_size=1, max_size=4).map("/".join).map(check_expression)
keys = st.lists(st.sampled_from(["a", "b", "ab", "aab", "@a"]), min_size=1, max_size=5).map("/".join)
entries = st.lists(st.tuples(expressions, st.integers(0, 4)), max_size=12)


def expected(entries: list[tuple[str, int]], key: str) -> set[int]:
    return {value for expression, value in entries if matches(expression, key)}


def assert_routes(router: KeyTrie[int], entries: list[tuple[str, int]], asked: list[str]) -> None:
    for key in asked:
        found = router.routes(key)
        assert len(found) == len(set(found)), f"{key} gives a value twice: {found}"
        assert set(found) == expected(entries, key), key


def assert_empty(router: KeyTrie[int]) -> None:
    root = router._root
    assert (root.children, root.values) == ({}, {})
    assert root.patterns is None or root.patterns._by_ends == {}


@settings(deadline=None, max_examples=300)
@given(entries, st.lists(keys, min_size=1, max_size=5), st.data())
def test_the_trie_gives_exactly_what_matching_gives_while_expressions_come_and_go(
    entries: list[tuple[str, int]], asked: list[str], data: st.DataObject
) -> None:
    asked = asked + KEYS
    router: KeyTrie[int] = KeyTrie()
    present: list[tuple[str, int]] = []

    for expression, value in entries:
        router.add(expression, value)
        present.append((expression, value))
        assert_routes(router, present, asked)
        if present and data.draw(st.booleans(), label="remove one"):
            router.remove(*present.pop(data.draw(st.integers(0, len(present) - 1))))
            assert_routes(router, present, asked)
    for entry in data.draw(st.permutations(present), label="remove the rest"):
        router.remove(*entry)
        present.remove(entry)
        assert_routes(router, present, asked)

    assert_empty(router)


def test_a_value_under_several_expressions_that_match_is_given_once() -> None:
    router: KeyTrie[str] = KeyTrie()
    for expression in ("shop/*", "**", "shop/orders", "$*op/**", "shop/**"):
        router.add(expression, "one")

    assert router.routes("shop/orders") == ("one",)


def test_a_value_stays_until_the_last_expression_that_finds_it_is_removed() -> None:
    router: KeyTrie[int] = KeyTrie()
    router.add("shop/*", 1)
    router.add("shop/*", 1)
    router.add("**", 1)

    router.remove("shop/*", 1)
    assert router.routes("shop/orders") == (1,)
    router.remove("**", 1)
    assert router.routes("shop/orders") == (1,)
    router.remove("shop/*", 1)

    assert router.routes("shop/orders") == ()
    assert_empty(router)


def test_removing_a_branch_leaves_the_longer_and_the_shorter_ones() -> None:
    router: KeyTrie[int] = KeyTrie()
    for value, expression in enumerate(("a", "a/b", "a/b/c")):
        router.add(expression, value)

    router.remove("a/b", 1)

    assert router.routes("a") == (0,)
    assert router.routes("a/b") == ()
    assert router.routes("a/b/c") == (2,)


def test_the_answers_that_are_kept_are_bounded() -> None:
    router: KeyTrie[int] = KeyTrie()
    router.add("a/*", 1)

    for number in range(ROUTES_KEPT_MAX + 10):
        assert router.routes(f"a/{number}") == (1,)

    assert list(router._routes) == [f"a/{number}" for number in range(10, ROUTES_KEPT_MAX + 10)]  # the oldest are gone


def lookup_ns(router: KeyTrie[int], keys: list[str]) -> int:
    """The time of looking up keys that were not asked for before; the best of a few tries."""
    best = 1 << 62
    for _ in range(7):
        router._routes.clear()
        start = time.perf_counter_ns()
        for key in keys:
            router.routes(key)
        best = min(best, time.perf_counter_ns() - start)
    return best


def test_a_lookup_costs_the_same_with_ten_thousand_other_expressions() -> None:
    few: KeyTrie[int] = KeyTrie()
    many: KeyTrie[int] = KeyTrie()
    for router, others in ((few, 10), (many, 10_000)):
        router.add("shop/*/created", -1)
        for number in range(others):
            router.add(("shop/{0}", "shop/{0}/*", "shop/{0}/**", "{0}/**", "**/{0}")[number % 5].format(number), number)
    asked = [f"shop/order{number}/created" for number in range(500)]

    few_ns, many_ns = lookup_ns(few, asked), lookup_ns(many, asked)

    assert few.routes(asked[0]) == many.routes(asked[0]) == (-1,)
    assert many_ns < 5 * few_ns, f"{many_ns / few_ns:.1f} times the cost"
