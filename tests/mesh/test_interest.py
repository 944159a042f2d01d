"""What a node wants of others."""

from __future__ import annotations

from zbus.mesh.interest import NEVER, Interest


def test_of_several_who_want_a_key_the_earliest_counts() -> None:
    interest = Interest()
    interest.add(["shop/**"], 7, store=False)
    interest.add(["shop/*"], 5, store=False)

    assert interest.of("shop/x") == (5, 5, False)
    assert interest.of("shop/x/y") == (7, 7, False)
    assert interest.of("audit").since == NEVER
    assert interest.earliest == 5


def test_what_is_recorded_and_what_is_live_are_distinguished() -> None:
    interest = Interest()
    interest.add(["shop/**"], 3, store=True)
    interest.add(["shop/x"], 9, store=False)

    assert interest.of("shop/x") == (3, 9, True)
    assert interest.of("shop/y") == (3, NEVER, True)
    assert interest.stores_any


def test_keys_without_interest_are_removed() -> None:
    interest = Interest()
    interest.add(["a", "b"], 1, store=True)
    interest.add(["a"], 1, store=True)

    interest.remove(["a", "b"], 1, store=True)

    assert interest.expressions == ("a",)
    assert interest.of("b").since == NEVER
    interest.remove(["a"], 1, store=True)
    assert interest.expressions == ()
    assert not interest.stores_any


def test_an_expression_that_several_use_is_requested_once() -> None:
    interest = Interest()
    for since in (1, 2, 3):
        interest.add(["a/**"], since, store=since == 2)

    assert interest.expressions == ("a/**",)
